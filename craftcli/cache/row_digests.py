"""Digests of the frames that anchors were made of, so that frames read again are the same ones.

A cache refers to frames of a dataset: for images that it does not hold, and for labels. A dataset's
fingerprint covers a few rows and no pixels of videos. These digests cover what every frame gave.

Videos decode to slightly other pixels on other machines. `brightness` is a coarse picture of the
images: where another decoder is used than at the build, it is compared instead, within
`BRIGHTNESS_TOLERANCE`, so that replaced images are still refused.

The cost is that of a hash: 0.7 ms for an image of 224 x 224 (tests/benchmarks/row_digests.py). The
thread that reads ahead pays it; decoding an image takes several times as long.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from craftcli.cache.format import DIGESTS
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.chunks import RowArrays
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.policies.base import Batch
from craftcli.policies.lerobot.identity import video_decoder

IMAGES, ACTION, BRIGHTNESS = f"{DIGESTS}images", f"{DIGESTS}action", f"{DIGESTS}brightness"
ALL = (IMAGES, ACTION, BRIGHTNESS)
BRIGHTNESS_TOLERANCE = 3
"""Of 255: decoders round each pixel by one or two, and a block has thousands."""
_ACTION = "action"
_ONE_ACTION = 2
"""Dimensions of a batch with one action a row; a chunk has one more."""
_BLOCKS = 4
"""Blocks of a picture, across and down."""


class Digester:
    """Computes the digests of rows that a dataset returned."""

    def __init__(self, dataset: Any) -> None:
        self._cameras = sorted(dataset.meta.camera_keys)
        # Of a chunk of actions, the frame's own: it does not depend on a policy's chunk length.
        chunk = (dataset.delta_timestamps or {}).get(_ACTION, [0])
        self._own = int(np.argmin(np.abs(chunk)))
        self.decoder = video_decoder(dataset)
        """What decodes the videos of the dataset; None if it has none."""

    def digest(self, batch: Batch, names: Collection[str] = ALL) -> RowArrays:
        """The digests of raw rows, by the names of their arrays in a cache."""
        seen = [name for name in self._cameras if name in batch]
        found: RowArrays = {}
        if seen and IMAGES in names:
            found[IMAGES] = _digests({name: batch[name] for name in seen})
        if seen and BRIGHTNESS in names and self.decoder:
            found[BRIGHTNESS] = np.concatenate([_brightness(batch[name]) for name in seen], axis=1)
        if _ACTION in batch and ACTION in names:
            actions = batch[_ACTION]
            own = actions[:, self._own] if actions.dim() > _ONE_ACTION else actions
            found[ACTION] = _digests({_ACTION: own})
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class FrameDigests:
    """The digests that a cache keeps of its frames, by the frame's index in the dataset."""

    cache: str
    dataset: str
    frames: NDArray[np.int64]
    """The frames, sorted, each once."""
    rows: NDArray[np.intp]
    """The first row of each frame."""
    arrays: RowArrays
    """The digests of these rows."""
    decoder: str | None
    """What decoded the videos at the build."""

    @classmethod
    def read(cls, reader: CacheReader) -> Self | None:
        """The digests of a cache; None if it has none, because an earlier version wrote it."""
        names = [name for name in ALL if name in reader.array_names()]
        if not names:
            return None
        frames, rows = np.unique(reader.read_all("index/dataset_index"), return_index=True)
        return cls(
            cache=str(reader.path),
            dataset=reader.manifest.dataset.repo_id,
            frames=frames,
            rows=rows,
            arrays={name: reader.read_all(name)[rows] for name in names},
            decoder=reader.manifest.decoder,
        )

    def check(
        self, frames: Sequence[int], batch: Batch, digester: Digester, *, labels: bool = False
    ) -> None:
        """Refuse rows that a dataset returned and that are not what the cache was built from.

        Args:
            frames: The rows' indices in the dataset.
            batch: The rows.
            digester: Computes digests of rows of that dataset.
            labels: Whether their actions are used too.

        Raises:
            CraftError: names the first such row, its frame and the dataset.
        """
        images = BRIGHTNESS if self._is_coarse(digester.decoder) else IMAGES
        names = [name for name in (images, ACTION if labels else images) if name in self.arrays]
        found = digester.digest(batch, names)
        wanted = np.asarray(frames, dtype=np.int64)
        places = np.minimum(np.searchsorted(self.frames, wanted), len(self.frames) - 1)
        known = self.frames[places] == wanted
        for name in names:
            differing = np.flatnonzero(known & ~self._same(name, places, found))
            if differing.size:
                first = differing[0]
                raise self._changed(name, int(self.rows[places[first]]), int(wanted[first]))

    def _is_coarse(self, decoder: str | None) -> bool:
        """Whether images can only be compared coarsely: another decoder made their pixels."""
        return decoder != self.decoder and BRIGHTNESS in self.arrays

    def _same(self, name: str, places: NDArray[np.intp], found: RowArrays) -> NDArray[np.bool_]:
        before, now = self.arrays[name][places], found.get(name)
        if now is None or now.shape != before.shape:
            return np.zeros(len(places), dtype=bool)
        if name != BRIGHTNESS:
            return np.asarray(before == now)
        distance = np.abs(before.astype(np.int16) - now.astype(np.int16))
        return np.asarray(distance.max(axis=1) <= BRIGHTNESS_TOLERANCE)

    def _changed(self, name: str, row: int, frame: int) -> CraftError:
        what = "action" if name == ACTION else "images"
        return CraftError(
            f"The dataset {self.dataset} has changed since the cache {self.cache} was built.",
            why=f"row {row} of the cache was made of frame {frame}, and its {what} is no "
            "longer what it was then.",
            fix="restore the dataset, or rebuild the cache with craft cache build --overwrite.",
            exit_code=EXIT_CHECK_FAILED,
        )


def _digests(values: dict[str, Tensor]) -> NDArray[np.uint64]:
    """A digest for each row of these tensors together."""
    parts = {name: value.detach().cpu().contiguous() for name, value in values.items()}
    rows = len(next(iter(parts.values())))
    digests = [hashlib.blake2b(digest_size=8) for _ in range(rows)]
    for name, part in parts.items():
        label = f"{name} {part.dtype} {tuple(part.shape[1:])}".encode()
        for digest, row in zip(digests, part, strict=True):
            digest.update(label)
            digest.update(row.reshape(-1).view(torch.uint8).numpy())
    return np.array([int.from_bytes(d.digest(), "little") for d in digests], dtype=np.uint64)


def _brightness(images: Tensor) -> NDArray[np.uint8]:
    """The mean of every block of the images [rows, ..., H, W], over colours and history."""
    pictures = images.detach().cpu().float().flatten(1, -3).mean(1)
    blocks = torch.nn.functional.adaptive_avg_pool2d(pictures[:, None], _BLOCKS).flatten(1)
    levels: NDArray[np.uint8] = (blocks * 255).round().clamp(0, 255).to(torch.uint8).numpy()
    return levels
