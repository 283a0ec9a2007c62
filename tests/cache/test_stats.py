import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craftcli.cache.stats import Moments, scalar_variance


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 20),
    chunk=st.integers(1, 21),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_chunks_agree_with_numpy_over_all(seed: int, rows: int, chunk: int, offset: float) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=(rows, 3, 2)) + offset).astype(np.float32)
    mask = rng.random((rows, 3)) < 0.6
    moments = Moments(3, 2)
    for start in range(0, rows, chunk):
        moments.update(values[start : start + chunk], mask[start : start + chunk])
    np.testing.assert_array_equal(moments.count, mask.sum(axis=0))
    for position in range(3):
        kept = values[mask[:, position], position].astype(np.float64)
        if len(kept):
            np.testing.assert_allclose(moments.mean[position], kept.mean(axis=0), rtol=1e-9)
            np.testing.assert_allclose(
                moments.variance[position], kept.var(axis=0), rtol=1e-7, atol=1e-12
            )
        else:
            assert not moments.mean[position].any()
            assert not moments.variance[position].any()


def test_merging_is_like_updating() -> None:
    rng = np.random.default_rng(0)
    values, mask = rng.normal(size=(9, 2, 4)), rng.random((9, 2)) < 0.5
    whole, left, right = Moments(2, 4), Moments(2, 4), Moments(2, 4)
    whole.update(values, mask)
    left.update(values[:5], mask[:5])
    right.update(values[5:], mask[5:])
    left.add(right)
    np.testing.assert_allclose(left.result().mean, whole.result().mean)
    np.testing.assert_allclose(left.result().variance, whole.result().variance)
    np.testing.assert_array_equal(left.result().count, whole.result().count)


def test_masked_values_may_be_anything() -> None:
    moments = Moments(1, 2)
    values = np.array([[[1.0, 2.0]], [[np.nan, np.inf]], [[3.0, 2.0]]], np.float32)
    moments.update(values, np.array([[True], [False], [True]]))
    np.testing.assert_array_equal(moments.mean, [[2.0, 2.0]])
    np.testing.assert_array_equal(moments.variance, [[1.0, 0.0]])


def test_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Moments(2, 3).update(np.zeros((4, 2, 2)), np.ones((4, 2), bool))
    with pytest.raises(ValueError, match="do not fit"):
        Moments(2, 3).update(np.zeros((4, 2, 3)), np.ones((3, 2), bool))


def test_scalar_variance_weighs_positions_by_count() -> None:
    variance = np.array([[1.0, 3.0], [10.0, 10.0], [99.0, 99.0]])
    assert scalar_variance(variance, np.array([3, 1, 0])) == pytest.approx((2 * 3 + 10) / 4)
    assert scalar_variance(variance, np.zeros(3, np.int64)) == 0.0
