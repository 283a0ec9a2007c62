"""Model inputs survive storage bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from craftcli.cache.inputs import UINT8_IMAGE, pack, unpack


def round_trip(value: torch.Tensor, *, image: bool) -> torch.Tensor:
    stored = pack(value, image=image)
    return unpack(stored, UINT8_IMAGE if stored.dtype == np.uint8 else {})


@settings(deadline=None, derandomize=True, max_examples=30)
@given(arrays.arrays(np.uint8, (2, 3, 4, 4), elements=st.integers(0, 255)))
def test_images_of_a_dataset_are_stored_as_their_bytes(pixels: np.ndarray) -> None:
    image = torch.from_numpy(pixels).float() / 255
    assert pack(image, image=True).dtype == np.uint8
    assert torch.equal(round_trip(image, image=True), image)


def test_every_byte_value_comes_back_exactly() -> None:
    image = torch.arange(256, dtype=torch.float32).reshape(1, 1, 16, 16) / 255
    assert torch.equal(round_trip(image, image=True), image)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(arrays.arrays(np.float32, (1, 3, 2, 2), elements=st.floats(-3, 3, width=32)))
def test_normalised_images_are_stored_as_they_are(values: np.ndarray) -> None:
    image = torch.from_numpy(values)
    assert torch.equal(round_trip(image, image=True), image)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.float64])
def test_other_inputs_keep_their_dtype(dtype: torch.dtype) -> None:
    value = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    back = round_trip(value, image=False)
    assert back.dtype == dtype
    assert torch.equal(back, value)


def test_a_mask_of_zeros_and_ones_is_no_image() -> None:
    """It would fit into bytes, but only cameras are read back as fractions of 255."""
    assert pack(torch.ones(2, 3), image=False).dtype == np.float32
