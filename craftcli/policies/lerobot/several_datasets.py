"""Several LeRobot datasets as one, without copying a frame.

LeRobot 0.6 has a `MultiLeRobotDataset`, but its own training refuses it: it has no metadata of the
whole, no episodes for a sampler, no tasks and no weights, and the same timestamps for all frame
rates. `SeveralDatasets` has what a LeRobotDataset has, as far as craft reads it. Its frames are
counted through: those of the first dataset, then those of the second, and so on.

Statistics of the whole are LeRobot's `aggregate_stats`: each dataset counts by its frames, as if
they were one dataset.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import Batch
from craftcli.policies.lerobot.batches import read_item
from craftcli.policies.lerobot.joined_metadata import JoinedMeta, feature_shape, own_names

_PADDING = "_is_pad"
_COUNTED = ("index", "episode_index", "task_index")
"""Columns that are counted through all datasets."""


def parts_of(dataset: Any) -> tuple[Any, ...]:
    """The datasets that a dataset consists of; empty for a single one."""
    parts: tuple[Any, ...] = getattr(dataset, "parts", ())
    return parts


def labels(parts: Sequence[Any]) -> list[str]:
    """Names that tell datasets apart: their own, or their folders if two have the same name."""
    names = [str(part.repo_id) for part in parts]
    same = len(set(names)) < len(names)
    return [str(part.root) for part in parts] if same else names


def frame_offsets(frames: Sequence[int]) -> NDArray[np.int64]:
    """Where each dataset begins in the common count of frames, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(frames)]).astype(np.int64)


class SeveralDatasets:
    """Several opened LeRobotDatasets that a policy reads as one.

    Only features that all of them have in one shape are read; `require_same_features` makes sure
    that these include the policy's.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        *,
        weights: Sequence[float | None],
        renames: Mapping[str, str],
    ) -> None:
        self.parts = tuple(parts)
        self.is_weighted = any(weight is not None for weight in weights)
        """Whether the user gave weights; without, every frame counts the same."""
        self.shares = _shares([len(part) for part in parts], weights)
        """The share of each dataset in the samples."""
        self.offsets = frame_offsets([len(part) for part in parts])
        self.repo_id = "+".join(part.repo_id for part in parts)
        self.root, self.revision = None, None
        self.episodes, self.absolute_to_relative_idx = None, None
        self.delta_timestamps = parts[0].delta_timestamps
        self._names = [own_names(part.meta.features, renames) for part in parts]
        self._common = [{own: common for common, own in names.items()} for names in self._names]
        self.meta = JoinedMeta.of(self.parts, self._names, self.offsets)
        self.part_metas = [
            JoinedMeta.of([part], [names], frame_offsets([len(part)]))
            for part, names in zip(self.parts, self._names, strict=True)
        ]
        """The metadata of each dataset, by the names of the whole."""
        self._tasks = [_task_numbers(part.meta, self.meta.tasks) for part in parts]
        self._first_episode = frame_offsets([part.meta.total_episodes for part in parts])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, index: int) -> Batch:
        number, row = self.locate(index)
        item = read_item(self.parts[number], row)
        found = {self._common_name(number, key): value for key, value in item.items()}
        kept = {key: value for key, value in found.items() if key is not None}
        kept["index"] = torch.tensor(index)
        kept["episode_index"] = item["episode_index"] + int(self._first_episode[number])
        kept["task_index"] = torch.tensor(int(self._tasks[number][int(item["task_index"])]))
        return kept

    def __repr__(self) -> str:
        return f"SeveralDatasets({self.repo_id}, shares={self.shares})"

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the dataset of a frame, and the frame's number in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"frame {index} is not among the {len(self)} frames of {self.repo_id}")
        number = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return number, index - int(self.offsets[number])

    @property
    def hf_dataset(self) -> "JoinedTable":
        """The tables of all datasets, one after the other."""
        return JoinedTable(self)

    def describe(self) -> str:
        """The datasets with their shares of the samples, in words."""
        return ", ".join(
            f"{name} ({share:.1%} of the samples, {len(part):,} frames)"
            for name, part, share in zip(labels(self.parts), self.parts, self.shares, strict=True)
        )

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of all tables, with numbers that count through all datasets."""
        own = [
            part.hf_dataset.data.column(names.get(name, name))
            for part, names in zip(self.parts, self._names, strict=True)
        ]
        if name in _COUNTED:
            return pa.chunked_array([self._counted(name, n, col) for n, col in enumerate(own)])
        return pa.chunked_array(
            [chunk for column in own for chunk in column.cast(own[0].type).chunks],
            type=own[0].type,
        )

    def _counted(self, name: str, number: int, column: pa.ChunkedArray) -> pa.Array:
        values = column.to_numpy()
        if name == "task_index":
            return pa.array(self._tasks[number][values])
        first = self.offsets if name == "index" else self._first_episode
        return pa.array(values + first[number])

    def _common_name(self, number: int, key: str) -> str | None:
        """The name of a part's feature in the whole; None if the whole has no such feature."""
        feature = key.removesuffix(_PADDING)
        common = self._common[number].get(feature, feature)
        if common != "task" and common not in self.meta.features:
            return None
        return common + key[len(feature) :]


class JoinedTable:
    """Stands in for the `hf_dataset` of several datasets, and for its `data`: whole columns."""

    def __init__(self, several: SeveralDatasets) -> None:
        self._several = several

    @property
    def data(self) -> "JoinedTable":
        """The table itself."""
        return self

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of all datasets."""
        return self._several.column(name)


def require_same_features(
    parts: Sequence[Any], policy_config: Any, renames: Mapping[str, str]
) -> None:
    """Refuse datasets that differ in a feature which the policy reads; names every difference."""
    to_dataset = {new: old for old, new in renames.items()}
    read = {**policy_config.input_features, **policy_config.output_features}
    metas = [part.meta for part in parts]
    names = [own_names(meta.features, renames) for meta in metas]
    problems = []
    for name in (to_dataset.get(key, key) for key in read):
        shapes = [
            feature_shape(meta.features, own.get(name, name))
            for meta, own in zip(metas, names, strict=True)
        ]
        # A camera that no dataset has is left to the policy.
        if len(set(shapes)) > 1:
            each = (
                f"{'absent' if shape is None else shape} in {label}"
                for label, shape in zip(labels(parts), shapes, strict=True)
            )
            problems.append(f"{name} is {' and '.join(each)}")
    if problems:
        raise CraftError(
            "These datasets do not fit together.",
            why="; ".join(problems) + ".",
            fix="use datasets with the same cameras, image sizes, states and actions. Where only "
            "a name differs, --rename THEIRS=THE_POLICYS renames it in the datasets that have it. "
            "lerobot-edit-dataset removes features.",
            exit_code=EXIT_USAGE,
        )


def describe_frame_rates(dataset: Any) -> str | None:
    """A warning about datasets of different frame rates; None if there is nothing to say."""
    parts = parts_of(dataset)
    rates = [part.meta.fps for part in parts]
    if len(set(rates)) < 2:
        return None
    each = ", ".join(f"{name} {fps}" for name, fps in zip(labels(parts), rates, strict=True))
    return (
        f"the datasets have different frame rates ({each} frames a second). An action chunk then "
        "covers another time in each, and nothing tells the policy which."
    )


def _shares(frames: Sequence[int], weights: Sequence[float | None]) -> tuple[float, ...]:
    """The share of each dataset: by its frames, or by its weight, which is 1 if it is missing."""
    if all(weight is None for weight in weights):
        own: list[float] = list(map(float, frames))
    else:
        own = [1.0 if weight is None else weight for weight in weights]
    return tuple(value / sum(own) for value in own)


def _task_numbers(meta: Any, tasks: Any) -> NDArray[np.int64]:
    """The number of each of a dataset's tasks in the list of all tasks."""
    own = meta.tasks["task_index"]
    numbers = np.zeros(int(own.max()) + 1 if len(own) else 0, dtype=np.int64)
    for task, number in own.items():
        numbers[int(number)] = tasks["task_index"].loc[str(task)]
    return numbers
