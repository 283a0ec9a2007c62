"""Where the raw rows of a build come from: frames of a dataset, as they are or varied.

A row is raw as a LeRobotDataset returns it: before the policy's preprocessor. What a row holds is a
function of the settings and its number alone, so that rows can be computed in any order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from craftcli.cache.build.prompts import Prompts
from craftcli.cache.format import MadeRows
from craftcli.cache.mixtures import mix_images, mix_vectors
from craftcli.cache.row_digests import Digester
from craftcli.cache.storage.chunks import RowArrays
from craftcli.cache.variations import Variations
from craftcli.policies.base import Batch
from craftcli.policies.identity import DatasetIdentity
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.identity import dataset_identity, part_identities
from craftcli.policies.lerobot.input_statistics import InputStatistics


@dataclass(frozen=True, kw_only=True, eq=False)
class RawRows:
    """Some rows of a source."""

    batch: Batch
    """The rows as the preprocessor takes them."""
    index: RowArrays
    """The arrays that say where each row came from."""
    seeds: list[int]
    """A seed for each row, for what the policy draws at random."""


class RowSource(Protocol):
    """Raw rows that become anchors, numbered from 0."""

    @property
    def tasks(self) -> list[str]:
        """Every instruction that a row can have; `index/task` counts in this list."""
        ...

    @property
    def made(self) -> MadeRows | None:
        """How rows were made that no dataset holds; None if all are frames of a dataset."""
        ...

    def __len__(self) -> int: ...

    def read(self, rows: Sequence[int]) -> RawRows:
        """Read or make these rows."""
        ...

    @property
    def decoder(self) -> str | None:
        """What decodes the videos of the data; None if there are none."""
        ...

    def identity(self) -> DatasetIdentity:
        """The data that the rows came from."""
        ...

    @property
    def parts(self) -> tuple[DatasetIdentity, ...] | None:
        """The datasets that the rows came from, if they are several."""
        ...


class DatasetFrames:
    """Frames of a dataset as they are, with the instructions that the prompts choose."""

    made = None

    def __init__(self, dataset: Any, frames: Sequence[int], prompts: Prompts, seed: int) -> None:
        self._dataset = dataset
        self._frames = list(frames)
        self._prompts = prompts
        self._seed = seed
        self._digester = Digester(dataset)
        self.tasks = prompts.all_for([str(task) for task in dataset.meta.tasks.index])
        self._task_numbers = {task: number for number, task in enumerate(self.tasks)}

    def __len__(self) -> int:
        return len(self._frames)

    def read(self, rows: Sequence[int]) -> RawRows:
        """Read these frames."""
        raw = read_rows(self._dataset, [self._frames[row] for row in rows])
        indices = raw["index"].tolist()
        raw["task"] = [
            self._prompts.choose(task, index)
            for task, index in zip(raw["task"], indices, strict=True)
        ]
        index = {
            "index/dataset_index": raw["index"],
            "index/episode": raw["episode_index"],
            "index/frame": raw["frame_index"],
            "index/task": torch.tensor([self._task_numbers[task] for task in raw["task"]]),
        }
        return RawRows(
            batch=raw,
            index={name: value.numpy() for name, value in index.items()}
            | self._digester.digest(raw),
            seeds=[row_seed(self._seed, frame) for frame in indices],
        )

    @property
    def decoder(self) -> str | None:
        """What decodes the videos of the dataset."""
        return self._digester.decoder

    def identity(self) -> DatasetIdentity:
        """The dataset, with a digest of the selected frames."""
        return dataset_identity(self._dataset, self._frames)

    @property
    def parts(self) -> tuple[DatasetIdentity, ...] | None:
        """The datasets, each with a digest of its own frames; None for a single one."""
        return part_identities(self._dataset, self._frames)


class VariedFrames:
    """Frames of a dataset, and `per_frame` variations of each; the teacher answers for all.

    Rows 0 to n - 1 are the n frames as they are. A variation of two random frames a and b is
    x = w a + (1 - w) b + noise * s * z, with a uniform weight w and z from a standard normal
    distribution, for every vector that the policy reads; s is the deviation of each number in the
    teacher's normaliser. Images are mixed by the same weight and then transformed. A variation with
    `mix` off repeats a frame, with another seed for what the policy draws at random. A single frame
    has no partner: its variations are noise and transforms alone.
    """

    def __init__(
        self,
        frames: DatasetFrames,
        *,
        per_frame: int,
        statistics: InputStatistics,
        noise: float,
        mix: bool,
        seed: int,
    ) -> None:
        self._frames = frames
        self._statistics = statistics
        self._noise = noise
        self._mix = mix
        self._seed = seed
        self._rows = len(frames) * (1 + per_frame)
        self.tasks = frames.tasks
        self.decoder = frames.decoder
        self.made = MadeRows(
            source="augment" if mix else "draws",
            rows=self._rows - len(frames),
            settings={"noise": f"{noise:g}", **statistics.settings()} if mix else {},
        )

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: Sequence[int]) -> RawRows:
        """Read frames and make their variations."""
        chosen = [self._choose(row) for row in rows]
        raw = self._frames.read([first for first, _, _ in chosen])
        partners = self._frames.read([second for _, second, _ in chosen])
        is_made = np.array([row >= len(self._frames) for row in rows])
        seeds = [
            row_seed(self._seed, int(frame), row) if made else seed
            for frame, row, made, seed in zip(
                raw.index["index/dataset_index"], rows, is_made, raw.seeds, strict=True
            )
        ]
        own_partners = partners.index["index/dataset_index"]
        variations = Variations(
            partners=own_partners if self._mix else np.where(is_made, -1, own_partners),
            weights=np.array([weight for _, _, weight in chosen], dtype=np.float32),
            seeds=np.where(is_made, np.array(seeds, dtype=np.int64), -1),
        )
        batch = dict(raw.batch)
        mix_vectors(batch, partners.batch, variations, self._statistics, noise=self._noise)
        mix_images(batch, partners.batch, variations, self._statistics.cameras)
        return RawRows(batch=batch, index=raw.index | variations.arrays(), seeds=seeds)

    def identity(self) -> DatasetIdentity:
        """The dataset of the frames."""
        return self._frames.identity()

    @property
    def parts(self) -> tuple[DatasetIdentity, ...] | None:
        """The datasets of the frames, if they are several."""
        return self._frames.parts

    def _choose(self, row: int) -> tuple[int, int, float]:
        """The two frames of a row, by their numbers, and the weight of the first."""
        count = len(self._frames)
        if row < count:
            return row, row, 1.0
        if not self._mix:
            return row % count, row % count, 1.0
        rng = np.random.default_rng([self._seed, row])
        weight = float(rng.uniform(0.5, 1.0))
        first = int(rng.integers(count))
        second = (first + int(rng.integers(1, count))) % count if count > 1 else first
        return first, second, weight


class StatisticsRows:
    """States drawn from the statistics of the teacher's normaliser: no data is needed at all.

    Every number is uniform between the smallest and largest value that the teacher's data had. A
    policy that reads several observations sees consecutive states, if a dataset showed how numbers
    move, and else the same state in all of them. Features with the same statistics are copies of
    each other and get the same numbers.
    """

    decoder = None
    parts = None

    def __init__(
        self, statistics: InputStatistics, *, rows: int, tasks: Sequence[str], seed: int
    ) -> None:
        self._statistics = statistics
        self._rows = rows
        self._seed = seed
        self.tasks = list(tasks) or [""]
        self.made = MadeRows(source="statistics", rows=rows, settings=statistics.settings())

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: Sequence[int]) -> RawRows:
        """Draw these rows."""
        drawn = [
            self._statistics.draw_uniform(np.random.default_rng([self._seed, r])) for r in rows
        ]
        tasks = [row % len(self.tasks) for row in rows]
        batch: Batch = {
            name: torch.from_numpy(np.stack([values[name] for values in drawn]))
            for name in drawn[0]
        }
        batch |= self._statistics.blank_actions(len(rows))
        batch["task"] = [self.tasks[task] for task in tasks]
        numbers: NDArray[np.int64] = np.array(rows, dtype=np.int64)
        index = {
            "index/dataset_index": numbers,
            "index/episode": np.zeros_like(numbers),
            "index/frame": numbers,
            "index/task": np.array(tasks, dtype=np.int64),
        }
        seeds = [row_seed(self._seed, row) for row in rows]
        variations = Variations(
            partners=np.full_like(numbers, -1),
            weights=np.ones(len(rows), dtype=np.float32),
            seeds=np.array(seeds, dtype=np.int64),
        )
        return RawRows(batch=batch, index=index | variations.arrays(), seeds=seeds)

    def identity(self) -> DatasetIdentity:
        """No dataset: a digest of the statistics takes the place of its fingerprint."""
        return DatasetIdentity(
            repo_id="statistics",
            root=None,
            revision=None,
            fingerprint=f"statistics:{self._statistics.digest()}",
            episodes=0,
            frames=self._rows,
            selection_digest="",
        )


def row_seed(*parts: int) -> int:
    """A seed for a row, from the seed of the build and what identifies the row."""
    return int(np.random.SeedSequence(list(parts)).generate_state(1, dtype=np.uint32)[0])
