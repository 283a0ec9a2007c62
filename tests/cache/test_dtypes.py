import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craftcli.cache.dtypes import decode, encode, is_finite, storage_dtype
from craftcli.errors import CraftError

DTYPES = ["float32", "float16", "bfloat16"]
# In range of every dtype, so that nothing overflows.
small_floats = st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=20)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(values=small_floats, dtype=st.sampled_from(DTYPES))
def test_rounding_is_close_and_idempotent(values: list[float], dtype: str) -> None:
    array = np.array(values, np.float32)
    stored = encode(array, dtype)
    assert stored.dtype == np.dtype(storage_dtype(dtype))
    decoded = decode(stored, dtype)
    assert decoded.dtype == np.float32
    relative = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    tiniest = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 2.0**-134}[dtype]
    error = np.abs(decoded.astype(np.float64) - array)
    assert np.all(error <= np.abs(array.astype(np.float64)) * relative + tiniest)
    np.testing.assert_array_equal(encode(decoded, dtype), stored)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F808000, 0x3F80),  # halfway, down to even
        (0x3F818000, 0x3F82),  # halfway, up to even
        (0x3F808001, 0x3F81),  # just above halfway
        (0x3FFFFFFF, 0x4000),  # carries into the exponent
        (0x80000000, 0x8000),  # -0
        (0x7F800000, 0x7F80),  # infinity
        (0xFF800000, 0xFF80),
        (0x00000001, 0x0000),  # subnormal
    ],
)
def test_bfloat16_rounds_to_nearest_even(bits: int, expected: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    assert int(encode(value, "bfloat16")[0]) == expected


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan(bits: int, dtype: str) -> None:
    stored = encode(np.array([bits], np.uint32).view(np.float32), dtype)
    assert np.isnan(decode(stored, dtype)).all()
    assert not is_finite(stored, dtype).any()


def test_every_finite_bfloat16_comes_back() -> None:
    stored = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    finite = stored[is_finite(stored, "bfloat16")]
    assert finite.size == 2**16 - 2 * 2**7
    np.testing.assert_array_equal(encode(decode(finite, "bfloat16"), "bfloat16"), finite)


def test_float16_overflow_names_wider_dtypes() -> None:
    with pytest.raises(CraftError, match="largest is 7e\\+04") as caught:
        encode(np.array([1.0, -70000.0], np.float32), "float16")
    assert "--dtype float32 or --dtype bfloat16" in caught.value.fix


def test_bfloat16_overflow_is_refused_too() -> None:
    with pytest.raises(CraftError, match="do not fit into bfloat16"):
        encode(np.array([np.finfo(np.float32).max]), "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_is_kept(dtype: str) -> None:
    values = np.array([np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(decode(encode(values, dtype), dtype), values)


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_shape_is_kept(shape: tuple[int, ...], dtype: str) -> None:
    assert decode(encode(np.ones(shape, np.float32), dtype), dtype).shape == shape


def test_wrong_storage_is_refused() -> None:
    with pytest.raises(ValueError, match="stored as uint16"):
        decode(np.zeros(2, np.float32), "bfloat16")
    with pytest.raises(ValueError, match="not one of"):
        storage_dtype("float64")
