import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from craftcli.engine.method import gradients as gradients_module
from craftcli.engine.method.gradients import Products, inner_products

SHAPES = [(3,), (2, 4), (), (2, 1, 3), (5,)]
GROUPS = [0, 2, 0, 1, 2]

properties = settings(deadline=None, derandomize=True, max_examples=50)
missing = st.lists(st.booleans(), min_size=len(SHAPES), max_size=len(SHAPES))
scales = st.sampled_from([1e-12, 1e-3, 1.0, 1e3, 1e12])


def make(seed: int, present: list[bool], scale: float = 1.0) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [scale * torch.randn(shape, generator=generator) for shape in SHAPES]
    return [g if there else None for g, there in zip(drawn, present, strict=True)]


def flat(gradients: list[Tensor | None]) -> Tensor:
    """One float64 vector, zeros where there is no gradient."""
    return torch.cat(
        [
            (torch.zeros(shape) if g is None else g).double().reshape(-1)
            for g, shape in zip(gradients, SHAPES, strict=True)
        ]
    )


def check(found: Products, t: Tensor, r: Tensor) -> None:
    size = (t.norm() * r.norm()).item()
    assert found.dot == pytest.approx(torch.dot(t, r).item(), abs=1e-6 * size)
    assert found.task_sq == pytest.approx(torch.dot(t, t).item(), rel=1e-6)
    assert found.ret_sq == pytest.approx(torch.dot(r, r).item(), rel=1e-6)
    assert found.cos == pytest.approx(torch.dot(t, r).item() / size if size else 0.0, abs=1e-6)


@properties
@given(seed=st.integers(0, 1000), in_task=missing, in_ret=missing, scale=scales)
def test_inner_products(seed: int, in_task: list[bool], in_ret: list[bool], scale: float) -> None:
    task, ret = make(seed, in_task, scale), make(seed + 1, in_ret, scale)
    (found,) = inner_products(task, ret)
    check(found, flat(task), flat(ret))


@properties
@given(seed=st.integers(0, 1000), in_task=missing, in_ret=missing)
def test_by_group(seed: int, in_task: list[bool], in_ret: list[bool]) -> None:
    task, ret = make(seed, in_task), make(seed + 1, in_ret)
    found = inner_products(task, ret, groups=GROUPS)
    for number, part in enumerate(found):
        own = torch.cat(
            [
                torch.full((math.prod(shape),), float(group == number))
                for shape, group in zip(SHAPES, GROUPS, strict=True)
            ]
        )
        check(part, own * flat(task), own * flat(ret))
    check(sum(found, Products(0.0, 0.0, 0.0)), flat(task), flat(ret))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "both transposed", "strided"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_many_elements_are_summed_in_pieces(
    monkeypatch: pytest.MonkeyPatch, layout: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(changed: bool) -> Tensor:
        if layout == "strided" and changed:
            return torch.randn(60, 17, generator=generator).to(dtype)[::2]
        if layout != "contiguous" and changed:
            return torch.randn(17, 30, generator=generator).to(dtype).t()
        return torch.randn(30, 17, generator=generator).to(dtype)

    task, ret = draw(True), draw(layout == "both transposed")
    monkeypatch.setattr(gradients_module, "SMALLEST_PIECE", 7)
    monkeypatch.setattr(gradients_module, "LARGEST_PIECE", 7)
    (found,) = inner_products([task], [ret])
    check(found, task.double().reshape(-1), ret.double().reshape(-1))


def test_parameters_of_different_precision_are_summed_together() -> None:
    task = [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(4, dtype=torch.float16)]
    (found,) = inner_products(task, task)
    assert found == Products(9.0, 9.0, 9.0)


def test_bfloat16_is_accumulated_in_float32() -> None:
    ones = torch.ones(5000, dtype=torch.bfloat16)
    # bfloat16 cannot even hold 5000.
    assert inner_products([ones], [ones * 3]) == [Products(15000.0, 5000.0, 45000.0)]


def test_large_values_do_not_overflow() -> None:
    large = torch.full((1000,), 1e15)
    (found,) = inner_products([large, large], [-large, -large])
    assert found.cos == pytest.approx(-1.0)
    assert math.isfinite(found.dot / found.ret_sq)


def test_a_loss_scale_is_divided_out() -> None:
    task, ret = torch.tensor([3.0, 4.0]), torch.tensor([1.0, -2.0])
    assert inner_products([8 * task], [8 * ret], scale=8.0) == inner_products([task], [ret])


def test_the_shards_of_several_processes_are_summed() -> None:
    """Each process has some elements of every parameter, of the last the second has none."""
    task, ret = make(0, [True] * 5), make(1, [True] * 5)
    everything = inner_products(task, ret, groups=GROUPS)

    def shard(gradients: list[Tensor | None], rank: int) -> list[Tensor | None]:
        flats = [g.reshape(-1) for g in gradients if g is not None]
        sizes = [f.numel() if number == 4 else f.numel() // 2 for number, f in enumerate(flats)]
        return [f[size:] if rank else f[:size] for f, size in zip(flats, sizes, strict=True)]

    tables: list[Tensor] = []

    def collect(table: Tensor) -> Tensor:
        tables.append(table)
        return table

    inner_products(shard(task, 1), shard(ret, 1), groups=GROUPS, reduce=collect)
    together = inner_products(
        shard(task, 0), shard(ret, 0), groups=GROUPS, reduce=lambda table: table + tables[0]
    )
    assert tables[0].shape == (3, 3)
    for found, expected in zip(together, everything, strict=True):
        assert found.dot == pytest.approx(expected.dot, rel=1e-5)
        assert found.task_sq == pytest.approx(expected.task_sq, rel=1e-5)
        assert found.ret_sq == pytest.approx(expected.ret_sq, rel=1e-5)


def test_a_process_without_gradients_still_takes_part() -> None:
    seen: list[torch.Size] = []

    def reduce(table: Tensor) -> Tensor:
        seen.append(table.shape)
        return table + 1.0

    found = inner_products([None, None], [None, None], groups=[0, 1], reduce=reduce)
    assert seen == [(2, 3)]
    assert found == [Products(1.0, 1.0, 1.0)] * 2


def test_the_cosine_is_clamped() -> None:
    assert Products(dot=-1.0000001, task_sq=1.0, ret_sq=1.0).cos == -1.0
    assert Products(dot=1.0000001, task_sq=1.0, ret_sq=1.0).cos == 1.0


@properties
@given(seed=st.integers(0, 1000), factor=st.just(0.0) | st.floats(1e-3, 10))
def test_scaling_the_retention_gradient(seed: int, factor: float) -> None:
    task, ret = make(seed, [True] * 5), make(seed + 1, [True] * 5)
    (found,) = inner_products(task, ret)
    check(found.scale_retention(factor), flat(task), factor * flat(ret))


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        inner_products([torch.ones(1)], [])
    with pytest.raises(ValueError, match="zip"):
        inner_products([torch.ones(1)], [torch.ones(1)], groups=[0, 0])


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of one, in which tensors can be sharded."""
    from torch import distributed
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # compiled

    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_sharded_gradients_are_merged_in_place() -> None:
    """FSDP2's gradients are DTensors, and stay so."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from craftcli.choices import Merge
    from craftcli.engine.method.projection import project_and_merge_

    mesh = init_device_mesh("cpu", (1,))
    plain = [torch.tensor([3.0, -4.0]), None], [torch.tensor([1.0, 2.0]), torch.ones(2)]
    sharded = [
        [None if g is None else distribute_tensor(g.clone(), mesh, [Shard(0)]) for g in side]
        for side in plain
    ]
    settings = {"threshold": 0.0, "project": True, "merge": Merge.EQUAL, "lam": 1.0}
    expected, expected_report = project_and_merge_(*plain, **settings)  # type: ignore[arg-type]
    merged, report = project_and_merge_(*sharded, reduce=lambda table: table, **settings)  # type: ignore[arg-type]
    assert report == expected_report
    for found, right in zip(merged, expected, strict=True):
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), right)  # type: ignore[arg-type]
