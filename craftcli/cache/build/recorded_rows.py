"""Rows from frames that the teacher saw when it acted itself: anchors without any dataset."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.build.prompts import Prompts
from craftcli.cache.build.row_sources import RawRows, row_seed
from craftcli.cache.format import MadeRows
from craftcli.cache.variations import Variations
from craftcli.policies.base import Batch
from craftcli.policies.identity import DatasetIdentity
from craftcli.policies.lerobot.batches import stack_observations
from craftcli.policies.lerobot.input_statistics import InputStatistics


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedFrame:
    """What a policy saw at one step of an episode."""

    episode: int
    """Number of the episode, over all environments."""
    frame: int
    """Step of the episode, from 0."""
    task: str
    observation: Mapping[str, NDArray[Any]]
    """The inputs by name; if the policy reads several observations, they are the first axis."""

    def update(self, digest: Any) -> None:
        """Add everything that the frame holds to a digest."""
        digest.update(f"{self.episode} {self.frame} {self.task}".encode())
        for name, values in sorted(self.observation.items()):
            digest.update(f"{name} {values.dtype} {values.shape}".encode())
            digest.update(np.ascontiguousarray(values).tobytes())


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedFrames:
    """Frames drawn from the teacher's own episodes."""

    frames: Sequence[RecordedFrame]
    environments: tuple[str, ...]
    episodes: int
    """Episodes that were recorded, over all environments."""


class RecordedRows:
    """Recorded frames as rows. They have no labels: the teacher's own actions take their place."""

    decoder = None
    parts = None

    def __init__(
        self, recorded: RecordedFrames, statistics: InputStatistics, prompts: Prompts, seed: int
    ) -> None:
        self._recorded = recorded
        self._frames = recorded.frames
        self._statistics = statistics
        self._prompts = prompts
        self._seed = seed
        seen = list(dict.fromkeys(frame.task for frame in recorded.frames))
        self.tasks = prompts.all_for(seen)
        self.made = MadeRows(
            source="rollouts",
            rows=len(recorded.frames),
            settings={
                "environments": ",".join(recorded.environments),
                "episodes": str(recorded.episodes),
            },
        )

    def __len__(self) -> int:
        return len(self._frames)

    def read(self, rows: Sequence[int]) -> RawRows:
        """These frames, as a dataset would return them."""
        frames = [self._frames[row] for row in rows]
        tasks = [self._prompts.choose(f.task, row) for f, row in zip(frames, rows, strict=True)]
        batch: Batch = {
            name: stack_observations([frame.observation[name] for frame in frames])
            for name in frames[0].observation
        }
        batch |= self._statistics.blank_actions(len(rows))
        batch["task"] = tasks
        index = {
            "index/dataset_index": rows,
            "index/episode": [frame.episode for frame in frames],
            "index/frame": [frame.frame for frame in frames],
            "index/task": [self.tasks.index(task) for task in tasks],
        }
        seeds = [row_seed(self._seed, row) for row in rows]
        variations = Variations(
            partners=np.full(len(rows), -1, dtype=np.int64),
            weights=np.ones(len(rows), dtype=np.float32),
            seeds=np.array(seeds, dtype=np.int64),
        )
        numbers = {name: np.array(values, dtype=np.int64) for name, values in index.items()}
        return RawRows(batch=batch, index=numbers | variations.arrays(), seeds=seeds)

    def identity(self) -> DatasetIdentity:
        """No dataset: a digest of the frames takes the place of its fingerprint."""
        digest = hashlib.sha256()
        for frame in self._frames:
            frame.update(digest)
        return DatasetIdentity(
            repo_id="rollouts",
            root=None,
            revision=None,
            fingerprint=f"rollouts:{digest.hexdigest()}",
            episodes=self._recorded.episodes,
            frames=len(self._frames),
            selection_digest="",
        )
