"""Digests of frames: what they notice, and what another decoder may change."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from craftcli.cache.row_digests import (
    ACTION,
    ALL,
    BRIGHTNESS,
    BRIGHTNESS_TOLERANCE,
    IMAGES,
    Digester,
    FrameDigests,
)
from craftcli.errors import CraftError

FRAMES = [4, 7, 2]
ROWS = np.array([5, 6, 7])


def dataset(*, videos: bool = False, chunk: list[float] | None = None) -> Any:
    """What a digester asks a dataset for."""
    meta = SimpleNamespace(camera_keys=["b", "a"], video_keys=["a"] if videos else [])
    deltas = None if chunk is None else {"action": chunk}
    return SimpleNamespace(meta=meta, delta_timestamps=deltas, _video_backend="pyav")


def batch(seed: int = 0) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    images = {name: torch.rand(3, 3, 16, 16, generator=random) for name in "ab"}
    return {**images, "action": torch.rand(3, 2, generator=random), "index": torch.arange(3)}


def kept(digester: Digester, rows: dict[str, Any], decoder: str | None = None) -> FrameDigests:
    """What a cache keeps of these rows."""
    order = np.argsort(FRAMES)
    return FrameDigests(
        cache="a.zarr",
        dataset="a/old",
        frames=np.sort(FRAMES),
        rows=ROWS[order],
        arrays={name: values[order] for name, values in digester.digest(rows).items()},
        decoder=decoder or digester.decoder,
    )


def test_digests_belong_to_rows_not_to_their_place() -> None:
    rows = batch()
    whole = Digester(dataset()).digest(rows)
    last = Digester(dataset()).digest({name: values[2:] for name, values in rows.items()})
    assert {name: values[2:].tolist() for name, values in whole.items()} == {
        name: values.tolist() for name, values in last.items()
    }
    assert set(whole) == {IMAGES, ACTION}
    assert whole[IMAGES].dtype == np.uint64


def test_an_action_counts_whatever_the_chunk() -> None:
    chunks = batch()
    chunks["action"] = torch.rand(3, 4, 2)
    alone = {**chunks, "action": chunks["action"][:, 1]}
    found = Digester(dataset(chunk=[-0.1, 0.0, 0.1, 0.2])).digest(chunks)
    assert found[ACTION].tolist() == Digester(dataset()).digest(alone)[ACTION].tolist()


@pytest.mark.parametrize("name", ["a", "b", "action"])
def test_one_changed_number_is_noticed(name: str) -> None:
    digester, rows = Digester(dataset()), batch()
    digests = kept(digester, rows)
    digests.check(FRAMES, rows, digester, labels=True)
    rows[name] = rows[name].clone()
    rows[name][1].view(-1)[-1] += 1e-6
    with pytest.raises(CraftError, match=r"a/old has changed.* row 6 .* frame 7, "):
        digests.check(FRAMES, rows, digester, labels=True)
    others = {key: values[[0, 2]] for key, values in rows.items()}
    digests.check([4, 2], others, digester, labels=True)


def test_labels_are_checked_where_they_are_used() -> None:
    digester, rows = Digester(dataset()), batch()
    digests = kept(digester, rows)
    rows["action"] = rows["action"] + 1
    digests.check(FRAMES, rows, digester)


def test_a_frame_that_the_cache_does_not_have_is_not_checked() -> None:
    digester = Digester(dataset())
    kept(digester, batch()).check([99, 1, 3], batch(1), digester)


def test_another_decoder_may_round_pixels_and_not_replace_images() -> None:
    digester, rows = Digester(dataset(videos=True)), batch()
    assert set(digester.digest(rows)) == set(ALL)
    assert digester.digest(rows)[BRIGHTNESS].shape == (3, 2 * 16)
    elsewhere = kept(digester, rows, decoder="torchcodec 9 alien")
    rounded = {**rows, "a": rows["a"] + (BRIGHTNESS_TOLERANCE - 1) / 255}
    elsewhere.check(FRAMES, rounded, digester)
    with pytest.raises(CraftError, match="images"):
        kept(digester, rows).check(FRAMES, rounded, digester)
    with pytest.raises(CraftError, match="images"):
        elsewhere.check(FRAMES, batch(1), digester)


def test_a_camera_that_is_gone_is_noticed() -> None:
    digester, rows = Digester(dataset()), batch()
    digests = kept(digester, rows)
    for gone in ("a", "b"):
        del rows[gone]
        with pytest.raises(CraftError, match="images"):
            digests.check(FRAMES, rows, digester)
