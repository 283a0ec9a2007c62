"""Model inputs survive storage bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from craftcli.cache.inputs import UINT8_IMAGE, fits_bytes, pack, unpack
from craftcli.errors import CraftError


def round_trip(value: torch.Tensor) -> torch.Tensor:
    as_bytes = fits_bytes(value)
    stored = pack(value, as_bytes=as_bytes)
    assert (stored.dtype == np.uint8) is as_bytes
    return unpack(stored, UINT8_IMAGE if as_bytes else {})


@settings(deadline=None, derandomize=True, max_examples=30)
@given(arrays.arrays(np.uint8, (2, 3, 4, 4), elements=st.integers(0, 255)))
def test_images_of_a_dataset_are_stored_as_their_bytes(pixels: NDArray[Any]) -> None:
    image = torch.from_numpy(pixels).float() / 255
    assert fits_bytes(image)
    assert torch.equal(round_trip(image), image)


def test_every_byte_value_comes_back_exactly() -> None:
    image = torch.arange(256, dtype=torch.float32).reshape(1, 1, 16, 16) / 255
    assert torch.equal(round_trip(image), image)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(arrays.arrays(np.float32, (1, 3, 2, 2), elements=st.floats(-3, 3, width=32)))
def test_normalised_images_are_stored_as_they_are(values: NDArray[Any]) -> None:
    image = torch.from_numpy(values)
    assert torch.equal(round_trip(image), image)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.float64])
def test_other_inputs_keep_their_dtype(dtype: torch.dtype) -> None:
    value = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    back = round_trip(value)
    assert back.dtype == dtype
    assert torch.equal(back, value)


def test_an_image_that_does_not_fit_is_refused_and_not_rounded() -> None:
    with pytest.raises(CraftError, match="cannot be stored as bytes"):
        pack(torch.full((1, 3, 2, 2), 0.12345), as_bytes=True)
