"""Mixtures of frames: between their frames, moved only where numbers move, by their seed alone."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from craftcli.cache.mixtures import mix_images, mix_vectors
from craftcli.cache.variations import Variations, frames_as_they_are
from craftcli.errors import CraftError
from craftcli.policies.lerobot.input_statistics import InputStatistics, VectorStatistics

STATE, COPY, OTHER = "observation.state", "observation.copy", "observation.other"
CAMERA = "observation.images.top"
SIZE, ROWS = 4, 5
STILL = 2
"""The number of each vector that never moved."""

FRAMES = arrays(np.float32, (ROWS, 2, SIZE), elements=st.floats(-3, 3, width=32))
SEEDS = arrays(np.int64, ROWS, elements=st.integers(-1, 2**32 - 1))
WEIGHTS = arrays(np.float32, ROWS, elements=st.floats(0, 1, width=32))


def vector(scale: float) -> VectorStatistics:
    deviation = np.full(SIZE, scale)
    deviation[STILL] = 0
    return VectorStatistics(low=-2 * deviation, high=2 * deviation, deviation=deviation)


STATISTICS = InputStatistics(
    vectors={STATE: vector(1.0), COPY: vector(1.0), OTHER: vector(0.5)},
    missing=(),
    cameras=(CAMERA,),
    histories={},
    action_shape=(3,),
)


def recipes(weights: Any, seeds: Any) -> Variations:
    return Variations(partners=np.arange(len(seeds)), weights=weights, seeds=seeds)


def mixed(
    first: Any, second: Any, variations: Variations, noise: float, *names: str
) -> dict[str, Any]:
    batch = {name: torch.from_numpy(first.copy()) for name in names or (STATE,)}
    partners = {name: torch.from_numpy(second.copy()) for name in batch}
    mix_vectors(batch, partners, variations, STATISTICS, noise=noise)
    return batch


@given(FRAMES, FRAMES, WEIGHTS, SEEDS)
def test_without_noise_a_mixture_lies_between_its_frames(
    first: Any, second: Any, weights: Any, seeds: Any
) -> None:
    found = mixed(first, second, recipes(weights, seeds), 0.0)[STATE].numpy()
    assert (found >= np.minimum(first, second) - 1e-5).all()
    assert (found <= np.maximum(first, second) + 1e-5).all()


@given(FRAMES, FRAMES, WEIGHTS, SEEDS, st.floats(0, 5))
def test_frames_and_numbers_without_spread_never_move(
    first: Any, second: Any, weights: Any, seeds: Any, noise: float
) -> None:
    found = mixed(first, second, recipes(weights, seeds), noise)[STATE].numpy()
    np.testing.assert_array_equal(found[..., STILL], first[..., STILL])
    np.testing.assert_array_equal(found[seeds < 0], first[seeds < 0])


@given(FRAMES, FRAMES, WEIGHTS, SEEDS, st.floats(0, 5))
def test_copies_of_a_vector_stay_copies(
    first: Any, second: Any, weights: Any, seeds: Any, noise: float
) -> None:
    found = mixed(first, second, recipes(weights, seeds), noise, STATE, OTHER, COPY)
    assert torch.equal(found[STATE], found[COPY])


@given(FRAMES, FRAMES, WEIGHTS, SEEDS, st.permutations(range(ROWS)), st.integers(1, ROWS))
def test_a_row_is_the_same_in_any_order_and_batch(
    first: Any, second: Any, weights: Any, seeds: Any, order: list[int], size: int
) -> None:
    whole = mixed(first, second, recipes(weights, seeds), 0.3)[STATE]
    some = order[:size]
    part = mixed(first[some], second[some], recipes(weights[some], seeds[some]), 0.3)[STATE]
    assert torch.equal(part, whole[some])


@given(FRAMES, FRAMES, WEIGHTS, st.integers(0, 2**32 - 1))
def test_a_history_moves_together(first: Any, second: Any, weights: Any, seed: int) -> None:
    seeds = np.full(ROWS, seed)
    plain = mixed(first, second, recipes(weights, seeds), 0.0)[STATE]
    noisy = mixed(first, second, recipes(weights, seeds), 1.0)[STATE]
    shift = noisy - plain
    torch.testing.assert_close(shift[:, 0], shift[:, 1], rtol=0, atol=1e-5)


def test_fixed_numbers_stay_in_all_copies() -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.normal(size=(ROWS, SIZE)).astype(np.float32) for _ in range(2))
    held = STATISTICS.with_fixed({COPY: (0,)})
    batch = {name: torch.from_numpy(first.copy()) for name in (STATE, COPY, OTHER)}
    partners = dict.fromkeys(batch, torch.from_numpy(second))
    variations = recipes(np.full(ROWS, 0.6, np.float32), np.arange(ROWS))
    mix_vectors(batch, partners, variations, held, noise=0.3)
    assert torch.equal(batch[STATE], batch[COPY])
    np.testing.assert_array_equal(batch[STATE][:, 0], first[:, 0])
    assert (batch[STATE].numpy()[:, 1] != first[:, 1]).all()
    assert (batch[OTHER].numpy()[:, 0] != first[:, 0]).all()


def images(seed: int, rows: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (rows, 3, 12, 16), dtype=np.uint8)
    return {CAMERA: torch.from_numpy(pixels).float() / 255}


def test_images_are_made_of_whole_bytes_by_their_seed_alone() -> None:
    variations = recipes(np.array([1, 0.7, 0.7], np.float32), np.array([-1, 5, 6]))
    batch, partners = images(0), images(1)
    plain = batch[CAMERA].clone()
    before = torch.get_rng_state()
    mix_images(batch, partners, variations, STATISTICS.cameras)
    assert torch.equal(torch.get_rng_state(), before)
    made = batch[CAMERA]
    assert torch.equal(made[0], plain[0])
    assert not torch.equal(made[1], plain[1])
    bytes_of = (made * 255).round()
    assert torch.equal(bytes_of / 255, made)
    torch.manual_seed(1234)
    alone = {CAMERA: plain[[2, 1]].clone()}
    backwards = recipes(variations.weights[[2, 1]], variations.seeds[[2, 1]])
    mix_images(alone, {CAMERA: partners[CAMERA][[2, 1]]}, backwards, STATISTICS.cameras)
    assert torch.equal(alone[CAMERA], made[[2, 1]])


def test_frames_with_other_draws_are_not_mixed() -> None:
    batch, plain = images(0), images(0)
    variations = Variations(
        partners=np.full(3, -1), weights=np.ones(3, np.float32), seeds=np.arange(3)
    )
    mix_images(batch, images(1), variations, STATISTICS.cameras)
    assert torch.equal(batch[CAMERA], plain[CAMERA])


@pytest.mark.parametrize("shape", [(3, 3, 12, 20), None])
def test_different_cameras_are_refused(shape: tuple[int, ...] | None) -> None:
    partners = {} if shape is None else {CAMERA: torch.zeros(shape)}
    with pytest.raises(CraftError, match="different cameras") as caught:
        mix_images(images(0), partners, frames_as_they_are(np.arange(3)), [CAMERA])
    assert "16 x 12 px" in caught.value.why
