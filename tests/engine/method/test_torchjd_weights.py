"""Agreement with TorchJD: we use its weights, and compare with its aggregators."""

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchjd import aggregation

from craftcli.choices import Merge
from craftcli.engine.method.gradients import Products, inner_products
from craftcli.engine.method.projection import project_and_merge_
from craftcli.engine.method.torchjd_weights import require_weighting, torchjd_weights
from craftcli.errors import CraftError

AGGREGATORS: dict[Merge, Any] = {
    Merge.UPGRAD: aggregation.UPGrad(),
    Merge.DUALPROJ: aggregation.DualProj(),
    Merge.MGDA: aggregation.MGDA(),
    Merge.CAGRAD: aggregation.CAGrad(c=0.5),
    Merge.ALIGNED_MTL: aggregation.AlignedMTL(),
    Merge.IMTL_G: aggregation.IMTLG(),
}

properties = settings(deadline=None, derandomize=True, max_examples=30)
every_weighting = pytest.mark.parametrize("merge", list(AGGREGATORS))


def test_every_merge_of_torchjd_is_compared() -> None:
    assert set(Merge) - set(AGGREGATORS) == {Merge.WEIGHTED, Merge.TASK_PRIORITY, Merge.EQUAL}


@every_weighting
@properties
@given(
    seed=st.integers(0, 1000),
    mix=st.floats(-2, 2),
    lam=st.floats(0.1, 5),
    scale=st.sampled_from([1e-9, 1.0, 1e6]),
)
def test_the_merged_gradient_is_the_aggregated_jacobian(
    merge: Merge, seed: int, mix: float, lam: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ret = torch.randn(7, generator=generator, dtype=torch.float64)
    task = torch.randn(7, generator=generator, dtype=torch.float64) + mix * ret
    jacobian = torch.stack([task, lam * ret])
    # TorchJD takes very small gradients for zero; ours may have any size.
    size = jacobian.norm()
    expected = AGGREGATORS[merge](jacobian / size) * size
    (merged,), _ = project_and_merge_(
        [task * scale], [ret * scale], threshold=0.0, project=True, merge=merge, lam=lam
    )
    torch.testing.assert_close(merged, expected * scale, rtol=1e-6, atol=1e-6 * scale * size.item())


@every_weighting
@pytest.mark.parametrize(("task_sq", "ret_sq"), [(4.0, 0.0), (0.0, 4.0), (0.0, 0.0)])
def test_a_zero_gradient_leaves_the_other_whole(
    merge: Merge, task_sq: float, ret_sq: float
) -> None:
    """MGDA would stand still at the teacher's weights, where L_ret and its gradient are 0."""
    assert torchjd_weights(merge, Products(0.0, task_sq, ret_sq)) == (1.0, 1.0)


@every_weighting
def test_no_λ_is_no_retention(merge: Merge) -> None:
    task, ret = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 0.5])
    (merged,), _ = project_and_merge_(
        [task.clone()], [ret], threshold=0.0, project=True, merge=merge, lam=0.0
    )
    assert torch.equal(merged, task)  # type: ignore[arg-type]


@every_weighting
def test_a_gradient_that_is_not_finite_is_not_hidden(merge: Merge) -> None:
    (products,) = inner_products([torch.tensor([1.0, math.inf])], [torch.ones(2)])
    assert all(math.isnan(weight) for weight in torchjd_weights(merge, products))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(CraftError, match=r"'upgrade'.*upgrad, dualproj, mgda"):
        torchjd_weights("upgrade", Products(0.0, 1.0, 1.0))


@pytest.mark.parametrize("absent", ["torchjd", "the solver"])
def test_a_missing_torchjd_is_an_error(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    require_weighting.cache_clear()
    if absent == "torchjd":
        monkeypatch.setitem(sys.modules, "torchjd", None)
    else:
        monkeypatch.setattr(
            "torchjd._mixins.find_spec", lambda name: None if name == "quadprog" else True
        )
    with pytest.raises(
        CraftError, match=r"--merge upgrad needs.*pip install 'craftcli\[torchjd\]'"
    ):
        require_weighting("upgrad")
