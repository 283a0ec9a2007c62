import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchjd.aggregation import PCGrad, PCGradWeighting

from craftcli.engine import surgery
from craftcli.engine.surgery import (
    Merge,
    Products,
    inner_products,
    merge_gradients_,
    merge_weights,
    operate_,
    projection_coefficient,
)

type Pair = tuple[list[Tensor | None], list[Tensor | None]]

SHAPES = [(3,), (2, 4), (), (2, 1, 3), (5,)]

properties = settings(deadline=None, derandomize=True, max_examples=50)
every_merge = pytest.mark.parametrize("merge", list(Merge))
missing = st.lists(
    st.sampled_from(["both", "task", "ret", "none"]), min_size=len(SHAPES), max_size=len(SHAPES)
)
scales = st.sampled_from([1e-12, 1e-3, 1.0, 1e3, 1e12])


def make_pair(
    seed: int,
    kinds: list[str] | None = None,
    *,
    mix: float = -0.5,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> Pair:
    """A task and a retention gradient; `mix` makes them conflict (< 0) or agree (> 0)."""
    generator = torch.Generator().manual_seed(seed)
    task: list[Tensor | None] = []
    ret: list[Tensor | None] = []
    for shape, kind in zip(SHAPES, kinds or ["both"] * len(SHAPES), strict=True):
        r = torch.randn(shape, generator=generator)
        t = torch.randn(shape, generator=generator) + mix * r
        task.append((t * scale).to(dtype) if kind in ("both", "task") else None)
        ret.append((r * scale).to(dtype) if kind in ("both", "ret") else None)
    return task, ret


def flat(gradients: list[Tensor | None]) -> Tensor:
    """One float64 vector, zeros where there is no gradient."""
    return torch.cat(
        [
            (torch.zeros(shape) if g is None else g).double().reshape(-1)
            for g, shape in zip(gradients, SHAPES, strict=True)
        ]
    )


def flat_one(gradients: list[Tensor | None]) -> Tensor:
    (gradient,) = gradients
    assert gradient is not None
    return gradient.clone()


def pair_with_cosine(cosine: float, scale: float) -> Pair:
    task = torch.tensor([cosine, math.sqrt(1 - cosine**2)], dtype=torch.float64) * scale
    return [task.float()], [torch.tensor([scale, 0.0])]


def run(pair: Pair, threshold: float = 0.0, lam: float = 0.0) -> list[Tensor | None]:
    merged, _ = operate_(*pair, threshold=threshold, project=True, merge=Merge.WEIGHTED, lam=lam)
    return merged


@properties
@given(seed=st.integers(0, 1000), kinds=missing, mix=st.floats(-2, 2), scale=scales)
def test_inner_products(seed: int, kinds: list[str], mix: float, scale: float) -> None:
    task, ret = make_pair(seed, kinds, mix=mix, scale=scale)
    products = inner_products(task, ret)
    t, r = flat(task), flat(ret)
    size = (t.norm() * r.norm()).item()
    assert products.dot == pytest.approx(torch.dot(t, r).item(), abs=1e-6 * size)
    assert products.task_sq == pytest.approx(torch.dot(t, t).item(), rel=1e-6)
    assert products.ret_sq == pytest.approx(torch.dot(r, r).item(), rel=1e-6)
    assert products.cos == pytest.approx(torch.dot(t, r).item() / size if size else 0.0, abs=1e-6)


def test_products_of_many_elements_are_summed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    # Transposed, so that the elements of the two do not lie in the same order in memory.
    task = torch.randn(30, 17, generator=generator).t()
    ret = torch.randn(17, 30, generator=generator)
    whole = inner_products([task], [ret])
    monkeypatch.setattr(surgery, "_PIECE", 7)
    pieces = inner_products([task], [ret])
    assert whole.dot == pytest.approx((task * ret).sum().item(), rel=1e-5)
    for name in ("dot", "task_sq", "ret_sq"):
        assert getattr(pieces, name) == pytest.approx(getattr(whole, name), rel=1e-5)


def test_bfloat16_is_accumulated_in_float32() -> None:
    ones = torch.ones(5000, dtype=torch.bfloat16)
    products = inner_products([ones], [ones * 3])
    # bfloat16 cannot even hold 5000.
    assert (products.dot, products.task_sq, products.ret_sq) == (15000.0, 5000.0, 45000.0)


def test_large_values_do_not_overflow() -> None:
    large = torch.full((1000,), 1e15)
    products = inner_products([large, large], [-large, -large])
    assert products.cos == pytest.approx(-1.0)
    assert math.isfinite(projection_coefficient(products, -0.1))


@properties
@given(seed=st.integers(0, 1000), kinds=missing, mix=st.floats(-2, 2))
def test_the_order_of_the_parameters_does_not_matter(
    seed: int, kinds: list[str], mix: float
) -> None:
    order = random.Random(seed).sample(range(len(SHAPES)), len(SHAPES))
    task, ret = make_pair(seed, kinds, mix=mix)
    shuffled = run(([task[i] for i in order], [ret[i] for i in order]), lam=0.7)
    task, ret = make_pair(seed, kinds, mix=mix)
    merged = run((task, ret), lam=0.7)
    for position, index in enumerate(order):
        torch.testing.assert_close(shuffled[position], merged[index])


@properties
@given(seed=st.integers(0, 1000), kinds=missing, mix=st.floats(-2, 2))
def test_projection_matches_torchjd(seed: int, kinds: list[str], mix: float) -> None:
    t, r = (flat(g) for g in make_pair(seed, kinds, mix=mix))
    task_half = run(([t.clone()], [r.clone()]))[0]
    ret_half = run(([r.clone()], [t.clone()]))[0]
    assert task_half is not None
    assert ret_half is not None
    # PCGrad sums the projected task and the projected retention gradient.
    torch.testing.assert_close(PCGrad()(torch.stack([t, r])), task_half + ret_half)
    # Its weight of the retention gradient is 1 for itself less the projection of the task.
    gramian = torch.stack([t, r]) @ torch.stack([t, r]).T
    coefficient = projection_coefficient(inner_products([t], [r]), 0.0)
    assert 1 - PCGradWeighting()(gramian)[1].item() == pytest.approx(coefficient, abs=1e-9)


@properties
@given(seed=st.integers(0, 1000), kinds=missing, mix=st.floats(-3, 3), scale=scales)
def test_never_conflicts_after_projection(
    seed: int, kinds: list[str], mix: float, scale: float
) -> None:
    task, ret = make_pair(seed, kinds, mix=mix, scale=scale)
    t, r = flat(task), flat(ret)
    projected = flat(run((task, ret)))
    rounding = 1e-6 * t.norm() * r.norm()
    assert torch.dot(projected, r) >= -rounding
    if torch.dot(t, r) > rounding:
        assert torch.equal(projected, t)


@properties
@given(scale=st.sampled_from([1e-12, 1e-6, 1.0, 1e6, 1e12]))
@pytest.mark.parametrize(
    ("cosine", "expected"), [(-0.995, True), (-0.11, True), (-0.09, False), (-0.002, False)]
)
def test_the_threshold_is_a_cosine(cosine: float, expected: bool, scale: float) -> None:
    """Fault 1: the raw dot product is huge or tiny with the gradients, whatever the angle."""
    task, ret = pair_with_cosine(cosine, scale)
    before = flat_one(task)
    merged, report = operate_(
        task, ret, threshold=-0.1, project=True, merge=Merge.WEIGHTED, lam=0.0
    )
    assert report.conflict is expected
    assert report.cos == pytest.approx(cosine, abs=1e-6)
    assert report.task_norm == pytest.approx(scale, rel=1e-6)
    assert report.ret_norm == pytest.approx(scale, rel=1e-6)
    assert report.dot == pytest.approx(cosine * scale**2, rel=1e-5)
    assert torch.equal(flat_one(merged), before) is not expected


def test_conflict_is_reported_when_projection_is_off() -> None:
    task, ret = pair_with_cosine(-0.9, 1.0)
    before = flat_one(task)
    merged, report = operate_(task, ret, threshold=0.0, project=False, merge=Merge.WEIGHTED, lam=0)
    assert report.conflict
    assert torch.equal(flat_one(merged), before)


@every_merge
@properties
@given(
    seed=st.integers(0, 1000),
    kinds=missing,
    projection=st.floats(-3, 3),
    lam=st.floats(0, 10),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_fused_merge_is_the_formula(
    merge: Merge,
    seed: int,
    kinds: list[str],
    projection: float,
    lam: float,
    dtype: torch.dtype,
) -> None:
    task, ret = make_pair(seed, kinds, dtype=dtype)
    t, r = flat(task), flat(ret)
    task_weight, ret_weight = {
        Merge.WEIGHTED: (1.0, lam),
        Merge.TASK_PRIORITY: (1.0, min(lam, 1.0)),
        Merge.EQUAL: (0.5, 0.5),
    }[merge]
    assert merge_weights(merge, lam) == (task_weight, ret_weight)
    expected = task_weight * (t - projection * r) + ret_weight * r
    merged = merge_gradients_(task, ret, projection=projection, merge=merge, lam=lam)
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    # Terms cancel, so the rounding is that of the largest of them.
    largest = (t.abs().max() + (abs(projection) + lam + 1) * r.abs().max()).item()
    torch.testing.assert_close(flat(merged), expected, rtol=rtol, atol=rtol * largest)
    assert [g is None for g in merged] == [kind == "none" for kind in kinds]


def test_merge_keeps_the_retention_gradient_of_a_parameter_without_task_gradient() -> None:
    """Fault 2."""
    task, ret = [None, torch.tensor([1.0])], [torch.tensor([2.0]), None]
    merged = merge_gradients_(task, ret, projection=0.0, merge=Merge.WEIGHTED, lam=3.0)
    assert [g.item() for g in merged if g is not None] == [6.0, 1.0]


def test_equal_halves_every_gradient() -> None:
    """Fault 2: also where only one of the losses reaches the parameter."""
    task = [torch.tensor([2.0]), torch.tensor([4.0]), None, None]
    ret = [torch.tensor([6.0]), None, torch.tensor([8.0]), None]
    merged = merge_gradients_(task, ret, projection=0.0, merge=Merge.EQUAL, lam=7.0)
    assert [None if g is None else g.item() for g in merged] == [4.0, 2.0, 4.0, None]


@every_merge
def test_nothing_is_allocated(merge: Merge) -> None:
    kinds = ["both", "task", "ret", "none", "both"]
    task, ret = make_pair(0, kinds)
    expected = [a if a is not None else b for a, b in zip(task, ret, strict=True)]
    merged, _ = operate_(task, ret, threshold=0.0, project=True, merge=merge, lam=2.0)
    for result, source in zip(merged, expected, strict=True):
        assert result is source
        assert result is None or source is None or result.data_ptr() == source.data_ptr()


def test_the_retention_gradient_is_only_read_where_the_task_has_one() -> None:
    task, ret = make_pair(0)
    before = flat(ret)
    operate_(task, ret, threshold=0.0, project=True, merge=Merge.EQUAL, lam=2.0)
    assert torch.equal(flat(ret), before)


@pytest.mark.parametrize("threshold", [-0.1, 0.0, 0.5])
@pytest.mark.parametrize("zero", ["task", "ret", "both"])
def test_zero_gradients_do_not_conflict(zero: str, threshold: float) -> None:
    task = torch.zeros(3) if zero in ("task", "both") else torch.ones(3)
    ret = torch.zeros(3) if zero in ("ret", "both") else torch.ones(3)
    expected = task + 2 * ret
    merged, report = operate_(
        [task], [ret], threshold=threshold, project=True, merge=Merge.WEIGHTED, lam=2.0
    )
    assert not report.conflict
    assert report.cos == 0.0
    assert torch.equal(flat_one(merged), expected)


@every_merge
@pytest.mark.parametrize("gradients", [[], [None, None]])
def test_no_gradients_at_all(merge: Merge, gradients: list[Tensor | None]) -> None:
    merged, report = operate_(
        gradients, gradients, threshold=0.0, project=True, merge=merge, lam=1.0
    )
    assert merged == gradients
    assert (report.cos, report.task_norm, report.ret_norm) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["task", "ret"])
def test_a_gradient_that_is_not_finite_is_not_hidden(bad: float, side: str) -> None:
    broken, fine = torch.tensor([1.0, bad]), torch.tensor([-1.0, -1.0])
    task, ret = (broken, fine) if side == "task" else (fine, broken)
    merged, report = operate_(
        [task], [ret], threshold=0.0, project=True, merge=Merge.WEIGHTED, lam=1.0
    )
    assert not math.isfinite(report.task_norm if side == "task" else report.ret_norm)
    assert math.isnan(report.cos)
    assert not flat_one(merged).isfinite().all()


def test_the_cosine_is_clamped() -> None:
    assert Products(dot=-1.0000001, task_sq=1.0, ret_sq=1.0).cos == -1.0
    assert Products(dot=1.0000001, task_sq=1.0, ret_sq=1.0).cos == 1.0


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        inner_products([torch.ones(1)], [])
    with pytest.raises(ValueError, match="zip"):
        merge_gradients_([torch.ones(1)], [], projection=0.0, merge=Merge.EQUAL, lam=1.0)
