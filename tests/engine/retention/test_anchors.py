"""Anchor rows come back as the teacher saw them, in an order that only the seed decides."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from craftcli.cache.reading.reader import CacheReader
from craftcli.engine.retention.anchors import AnchorSet, Walk
from craftcli.errors import CraftError
from craftcli.policies.base import FeatureRequest
from craftcli.policies.lerobot.batches import read_rows

CPU = torch.device("cpu")


def test_inputs_are_bit_for_bit_what_the_preprocessor_gave(
    teacher: Any, old_data: Any, cache: Path
) -> None:
    reader = CacheReader.open(cache)
    anchors = AnchorSet(reader, batch_size=8, seed=0)
    rows = np.arange(8)
    indices = reader.read("index/dataset_index", rows).tolist()
    processed = teacher.preprocess(read_rows(old_data, indices))
    expected = teacher.adapter.anchor_inputs(
        teacher.policy, processed, seeds=[0] * 8, own_actions=True
    )
    found = anchors.read(rows, CPU)
    keys = teacher.adapter.input_keys(teacher.policy, expected, FeatureRequest(with_actions=True))
    assert set(found.inputs) == set(keys)
    for key, value in found.inputs.items():
        assert value.dtype == expected[key].dtype
        assert torch.equal(value, expected[key]), key


def test_images_are_stored_as_bytes(cache: Path) -> None:
    assert CacheReader.open(cache).spec("inputs/observation.images.top").dtype == "uint8"


def drawn(anchors: AnchorSet, batches: int) -> list[int]:
    rows = [anchors.walk.rows(n) for n in range(batches)]
    return np.concatenate(rows).tolist()


def test_every_round_shows_every_row_once(cache: Path) -> None:
    anchors = AnchorSet(CacheReader.open(cache), batch_size=8, seed=3)
    rows = drawn(anchors, 8)
    first, second = rows[:32], rows[32:]
    assert sorted(first) == sorted(second) == list(range(32))
    assert first != second


def test_a_batch_may_cross_from_one_round_to_the_next(cache: Path) -> None:
    anchors = AnchorSet(CacheReader.open(cache), batch_size=12, seed=0)
    rows = drawn(anchors, 8)
    for start in range(0, 96, 32):
        assert sorted(rows[start : start + 32]) == list(range(32))


def test_order_is_a_function_of_the_seed_alone(cache: Path) -> None:
    one, same, other = (AnchorSet(CacheReader.open(cache), batch_size=8, seed=s) for s in (1, 1, 2))
    assert drawn(one, 5) == drawn(same, 5)
    assert drawn(one, 5) != drawn(other, 5)


def test_a_round_is_shuffled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled: list[Any] = []
    make = np.random.default_rng

    def counting(seed: Any) -> np.random.Generator:
        shuffled.append(seed)
        return make(seed)

    monkeypatch.setattr(np.random, "default_rng", counting)
    walk = Walk(np.arange(100), batch_size=10, seed=7)
    rows = [walk.rows(number) for number in range(25)]
    assert shuffled == [[7, 0], [7, 1], [7, 2]]
    expected = np.concatenate([make([7, r]).permutation(100) for r in range(3)])
    assert np.array_equal(np.concatenate(rows), expected[:250])


def test_states_that_do_not_vary_are_refused(build: Any, tmp_path: Path) -> None:
    with pytest.raises(CraftError, match=r"cannot be normalised.*vlm\.2 has zero variance"):
        AnchorSet(CacheReader.open(build(tmp_path / "a.zarr", samples=1)), batch_size=1, seed=0)


def test_fewer_anchors_than_a_batch_is_an_error_at_once(cache: Path) -> None:
    with pytest.raises(CraftError, match=r"32 usable anchors.*--anchor-batch-size 32"):
        AnchorSet(CacheReader.open(cache), batch_size=33, seed=0)
