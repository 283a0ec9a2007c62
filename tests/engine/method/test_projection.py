import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchjd.aggregation import PCGrad, PCGradWeighting

from craftcli.choices import Merge
from craftcli.engine.method.gradients import Products, Weights, inner_products, weighted_sum_
from craftcli.engine.method.projection import (
    merge_weights,
    project_and_merge_,
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
    merged, _ = project_and_merge_(
        *pair, threshold=threshold, project=True, merge=Merge.WEIGHTED, lam=lam
    )
    return merged


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
    coefficient = projection_coefficient(inner_products([t], [r])[0], 0.0)
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
    merged, report = project_and_merge_(
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
    merged, report = project_and_merge_(
        task, ret, threshold=0.0, project=False, merge=Merge.WEIGHTED, lam=0
    )
    assert report.conflict
    assert torch.equal(flat_one(merged), before)


@properties
@given(
    seed=st.integers(0, 1000),
    kinds=missing,
    weights=st.lists(st.tuples(st.floats(0, 2), st.floats(-5, 5)), min_size=3, max_size=3),
    groups=st.lists(st.integers(0, 2), min_size=len(SHAPES), max_size=len(SHAPES)),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_merging_is_the_formula(
    seed: int,
    kinds: list[str],
    weights: list[tuple[float, float]],
    groups: list[int],
    dtype: torch.dtype,
) -> None:
    task, ret = make_pair(seed, kinds, dtype=dtype)
    t, r = flat(task), flat(ret)
    sizes = torch.tensor([math.prod(shape) for shape in SHAPES])
    a, b = (
        torch.tensor([weights[g][side] for g in groups]).double().repeat_interleave(sizes)
        for side in (0, 1)
    )
    merged = weighted_sum_(task, ret, [Weights(*w) for w in weights], groups=groups)
    rtol = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
    # Terms cancel, so the rounding is that of the largest of them.
    largest = 2 * t.abs().max().item() + 5 * r.abs().max().item()
    tolerance = rtol[dtype]
    torch.testing.assert_close(
        flat(merged), a * t + b * r, rtol=tolerance, atol=tolerance * largest
    )
    assert [g is None for g in merged] == [kind == "none" for kind in kinds]


@pytest.mark.parametrize(
    ("merge", "expected"),
    [
        (Merge.WEIGHTED, Weights(1.0, 3.0 + 0.5)),
        (Merge.TASK_PRIORITY, Weights(1.0, 1.0 + 0.5)),
        (Merge.EQUAL, Weights(0.5, 0.5 + 0.5 * 0.5)),
    ],
)
def test_the_projection_is_fused_into_the_weight_of_retention(
    merge: Merge, expected: Weights
) -> None:
    products = Products(dot=-2.0, task_sq=3.0, ret_sq=4.0)
    assert merge_weights(products, threshold=0.0, project=True, merge=merge, lam=3.0) == expected
    plain = merge_weights(products, threshold=0.0, project=False, merge=merge, lam=3.0)
    assert plain.ret == expected.ret - 0.5 * expected.task


def test_merge_keeps_the_retention_gradient_of_a_parameter_without_task_gradient() -> None:
    """Fault 2."""
    merged = run(([None, torch.tensor([1.0])], [torch.tensor([2.0]), None]), lam=3.0)
    assert [g.item() for g in merged if g is not None] == [6.0, 1.0]


def test_equal_halves_every_gradient() -> None:
    """Fault 2: also where only one of the losses reaches the parameter."""
    task = [torch.tensor([2.0]), torch.tensor([4.0]), None, None]
    ret = [torch.tensor([6.0]), None, torch.tensor([8.0]), None]
    merged, _ = project_and_merge_(
        task, ret, threshold=0.0, project=True, merge=Merge.EQUAL, lam=7.0
    )
    assert [None if g is None else g.item() for g in merged] == [4.0, 2.0, 4.0, None]


@every_merge
def test_nothing_is_allocated(merge: Merge) -> None:
    kinds = ["both", "task", "ret", "none", "both"]
    task, ret = make_pair(0, kinds)
    expected = [a if a is not None else b for a, b in zip(task, ret, strict=True)]
    merged, _ = project_and_merge_(task, ret, threshold=0.0, project=True, merge=merge, lam=2.0)
    for result, source in zip(merged, expected, strict=True):
        assert result is source
        assert result is None or source is None or result.data_ptr() == source.data_ptr()


def test_the_retention_gradient_is_only_read_where_the_task_has_one() -> None:
    task, ret = make_pair(0)
    before = flat(ret)
    project_and_merge_(task, ret, threshold=0.0, project=True, merge=Merge.EQUAL, lam=2.0)
    assert torch.equal(flat(ret), before)


@pytest.mark.parametrize("threshold", [-0.1, 0.0, 0.5])
@pytest.mark.parametrize("zero", ["task", "ret", "both"])
def test_zero_gradients_do_not_conflict(zero: str, threshold: float) -> None:
    task = torch.zeros(3) if zero in ("task", "both") else torch.ones(3)
    ret = torch.zeros(3) if zero in ("ret", "both") else torch.ones(3)
    expected = task + 2 * ret
    merged, report = project_and_merge_(
        [task], [ret], threshold=threshold, project=True, merge=Merge.WEIGHTED, lam=2.0
    )
    assert not report.conflict
    assert report.cos == 0.0
    assert torch.equal(flat_one(merged), expected)


@every_merge
@pytest.mark.parametrize("gradients", [[], [None, None]])
def test_no_gradients_at_all(merge: Merge, gradients: list[Tensor | None]) -> None:
    merged, report = project_and_merge_(
        gradients, gradients, threshold=0.0, project=True, merge=merge, lam=1.0
    )
    assert merged == gradients
    assert (report.cos, report.task_norm, report.ret_norm) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["task", "ret"])
def test_a_gradient_that_is_not_finite_is_not_hidden(bad: float, side: str) -> None:
    broken, fine = torch.tensor([1.0, bad]), torch.tensor([-1.0, -1.0])
    task, ret = (broken, fine) if side == "task" else (fine, broken)
    merged, report = project_and_merge_(
        [task], [ret], threshold=0.0, project=True, merge=Merge.WEIGHTED, lam=1.0
    )
    assert not math.isfinite(report.task_norm if side == "task" else report.ret_norm)
    assert math.isnan(report.cos)
    assert not flat_one(merged).isfinite().all()


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        weighted_sum_([torch.ones(1)], [], [Weights(1.0, 1.0)])


@properties
@given(
    seed=st.integers(0, 1000),
    kinds=missing,
    mix=st.floats(-3, 3),
    groups=st.lists(st.integers(0, 2), min_size=len(SHAPES), max_size=len(SHAPES)),
    merge=st.sampled_from(Merge),
)
def test_a_group_is_projected_and_merged_as_if_it_were_alone(
    seed: int, kinds: list[str], mix: float, groups: list[int], merge: Merge
) -> None:
    settings: Any = {"threshold": -0.1, "project": True, "merge": merge, "lam": 0.7}
    task, ret = make_pair(seed, kinds, mix=mix)
    _, whole = project_and_merge_(*make_pair(seed, kinds, mix=mix), **settings)
    alone = [g for pair in [make_pair(seed, kinds, mix=mix)] for g in pair]
    merged, report = project_and_merge_(task, ret, groups=groups, **settings)
    reports = []
    for number in set(groups):
        chosen = [i for i, group in enumerate(groups) if group == number]
        expected, part = project_and_merge_(
            *([side[i] for i in chosen] for side in alone), **settings
        )
        reports.append(part)
        for i, gradient in zip(chosen, expected, strict=True):
            torch.testing.assert_close(merged[i], gradient)
    for name in ("dot", "cos", "task_norm", "ret_norm"):
        assert getattr(report, name) == pytest.approx(getattr(whole, name), rel=1e-6, abs=1e-6)
    reached = [part for part in reports if part.task_norm and part.ret_norm]
    share = sum(part.conflict for part in reached) / max(len(reached), 1)
    assert report.conflict_share == pytest.approx(share)
    assert report.conflict is any(part.conflict for part in reports)


@properties
@given(seed=st.integers(0, 1000), kinds=missing, mix=st.floats(-3, 3), scale=scales)
def test_no_group_conflicts_after_projection(
    seed: int, kinds: list[str], mix: float, scale: float
) -> None:
    task, ret = make_pair(seed, kinds, mix=mix, scale=scale)
    groups = [0, 1, 0, 2, 1]
    before = [None if g is None else g.double() for g in task]
    opposing = [None if g is None else g.double() for g in ret]
    merged, _ = project_and_merge_(
        task, ret, threshold=0.0, project=True, merge=Merge.WEIGHTED, lam=0.0, groups=groups
    )
    after = inner_products(
        [None if g is None else g.double() for g in merged], opposing, groups=groups
    )
    for products, was in zip(after, inner_products(before, opposing, groups=groups), strict=True):
        assert products.dot >= -1e-6 * math.sqrt(was.task_sq * was.ret_sq)


@properties
@given(seed=st.integers(0, 1000), mix=st.floats(-2, 2), merge=st.sampled_from(Merge))
@pytest.mark.parametrize("loss_scale", [2.0**16, 2.0**-8])
def test_a_loss_scale_changes_neither_decision_nor_report(
    seed: int, mix: float, merge: Merge, loss_scale: float
) -> None:
    settings: Any = {"threshold": -0.1, "project": True, "merge": merge, "lam": 0.7}
    plain, plain_report = project_and_merge_(*make_pair(seed, mix=mix), **settings)
    scaled, report = project_and_merge_(
        *make_pair(seed, mix=mix, scale=loss_scale), scale=loss_scale, **settings
    )
    # Powers of two, so that nothing is rounded.
    assert report == plain_report
    torch.testing.assert_close(flat(scaled) / loss_scale, flat(plain), rtol=1e-5, atol=1e-6)
