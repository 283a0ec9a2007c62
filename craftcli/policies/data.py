"""Opening LeRobot datasets and drawing task batches from them, in LeRobot's own order."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from lerobot.datasets import EpisodeAwareSampler
from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.datasets.factory import resolve_delta_timestamps
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.utils.collate import lerobot_collate_fn
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate

from craftcli.cache.processes import Processes
from craftcli.errors import CraftError
from craftcli.policies.base import Batch
from craftcli.policies.columns import Columns
from craftcli.policies.dataset_versions import INFO_FILE, check_local_version, check_version

REMEMBER_BYTES = 512 * 2**20


def open_dataset(
    repo_id: str,
    *,
    root: str | None,
    revision: str | None = None,
    policy_config: Any,
    renames: Mapping[str, str] | None = None,
) -> Any:
    """A LeRobotDataset with the action chunks and histories that the policy asks for.

    `renames` lead from its names to the policy's.
    """
    local = root or (repo_id if Path(repo_id).is_dir() else None)
    if local and not (Path(local) / INFO_FILE).is_file():
        raise CraftError(
            f"No LeRobot dataset at {local}.",
            why=f"the folder has no {INFO_FILE}.",
            fix="give --dataset-root the folder that holds meta/ and data/.",
        )
    if local:
        check_local_version(Path(local))
    name = repo_id if root or not local else Path(local).resolve().name
    try:
        meta = LeRobotDatasetMetadata(name, root=local, revision=revision)
        check_version(name, meta.info.codebase_version)
        check_features(policy_config, meta, renames or {})
        dataset = LeRobotDataset(
            name,
            root=local,
            revision=revision,
            delta_timestamps=resolve_delta_timestamps(policy_config, meta),
        )
    except CraftError:
        raise
    except Exception as error:  # LeRobot lets through whatever the Hub and its parsers raise
        if local:
            raise CraftError(
                f"Cannot read the dataset {local}.",
                why=f"a file is missing or damaged ({type(error).__name__}: {error}).",
                fix="record or download it again.",
            ) from error
        raise CraftError(
            f"Cannot open the dataset {repo_id!r}.",
            why=f"it is no folder here, and the Hub did not give it: {error}",
            fix="check the name, or give --dataset-root the folder of a downloaded dataset.",
        ) from error
    Columns.into(dataset)
    return dataset


def check_features(policy_config: Any, meta: Any, renames: Mapping[str, str]) -> None:
    """Refuse a dataset that lacks what the policy reads, or has it in another shape."""
    problems = [
        f"{old} is renamed to {new}, which it has already"
        for old, new in renames.items()
        if old in meta.features and new in meta.features and new not in renames
    ]
    features = {renames.get(key, key): feature for key, feature in meta.features.items()}
    cameras = policy_config.image_features
    if cameras and not any(key in features for key in cameras):
        problems.append(f"no camera of {', '.join(cameras)} (it has {', '.join(meta.camera_keys)})")
    wanted = {**policy_config.input_features, **policy_config.output_features}
    for key, feature in wanted.items():
        if key in cameras:
            continue
        have = features.get(key)
        if have is None:
            problems.append(f"no {key}")
        elif tuple(have["shape"]) != tuple(feature.shape):
            problems.append(f"{key} is {tuple(have['shape'])}, not {tuple(feature.shape)}")
    if problems:
        raise CraftError(
            f"The dataset {meta.repo_id!r} does not fit the policy.",
            why="; ".join(problems) + ".",
            fix="use the dataset the policy was made for, a policy with these features, or "
            "--rename THEIRS=THE_POLICYS where only names differ.",
        )


class Remembered(Dataset[Batch]):
    """A dataset whose items are kept in memory once read.

    LeRobot decodes an image for every action step of an item: the demo's items take 6 ms each, more
    than the training step itself; from memory they are free. Only for datasets that fit easily.
    """

    def __init__(self, dataset: Any) -> None:
        self.meta = dataset.meta
        self._dataset = dataset
        self._items: dict[int, Batch] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Batch:
        if index not in self._items:
            self._items[index] = self._dataset[index]
        return self._items[index]


def remember_if_small(dataset: Any) -> Any:
    """Keep items in memory when all of them together stay below half a gigabyte."""
    one = dataset[0]
    size = sum(v.nbytes for v in one.values() if isinstance(v, torch.Tensor))
    return Remembered(dataset) if size * len(dataset) <= REMEMBER_BYTES else dataset


class TaskBatches:
    """Raw batches without end, in the order LeRobot's own training draws them.

    Of several processes each gets its own, as accelerate shares them out. `position` is where an
    earlier run was, from `position`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int,
        workers: int,
        drop_last_frames: int = 0,
        processes: Processes | None = None,
        position: Mapping[str, int] | None = None,
    ) -> None:
        meta, own = dataset.meta, processes or Processes()
        self._cameras = meta.camera_keys
        sampler = EpisodeAwareSampler(
            meta.episodes["dataset_from_index"],
            meta.episodes["dataset_to_index"],
            episode_indices_to_use=dataset.episodes,
            drop_n_last_frames=drop_last_frames,
            shuffle=True,
            seed=seed,
            absolute_to_relative_idx=dataset.absolute_to_relative_idx,
        )
        self._frames = len(sampler)
        self._together = batch_size * own.world
        self._epoch, self._start = 0, 0
        if position is not None:
            sampler.load_state_dict(dict(position))
            self._epoch, self._start = position["epoch"], position["start_index"]
        batches: Any = BatchSampler(sampler, batch_size, drop_last=False)
        if not own.alone:
            batches = BatchSamplerShard(batches, num_processes=own.world, process_index=own.rank)
        self._loader: DataLoader[Batch] = DataLoader(
            dataset if workers else remember_if_small(dataset),
            batch_sampler=batches,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context="spawn" if workers else None,
            pin_memory=torch.cuda.is_available(),
            collate_fn=_collate(meta),
        )

    @property
    def position(self) -> dict[str, int]:
        """Where the next batch begins: in which round over the data, and how far into it."""
        if self._start >= self._frames:
            return {"epoch": self._epoch + 1, "start_index": 0}
        return {"epoch": self._epoch, "start_index": self._start}

    def __iter__(self) -> Iterator[Batch]:
        while True:
            for batch in self._loader:
                self._start += self._together
                yield float_images(batch, self._cameras)
            self._epoch, self._start = self._epoch + 1, 0


def read_rows(dataset: Any, rows: list[int]) -> Batch:
    """The rows as one raw batch, in the order given."""
    meta = dataset.meta
    return float_images(_collate(meta)([dataset[row] for row in rows]), meta.camera_keys)


def _collate(meta: Any) -> Callable[[list[Batch]], Batch]:
    """How rows become a batch: annotations in words, which LeRobot may add, are left out."""
    chosen: Callable[[list[Batch]], Batch]
    chosen = lerobot_collate_fn if meta.has_language_columns else default_collate
    return chosen


def float_images(batch: Batch, cameras: list[str]) -> Batch:
    """Images as LeRobot's training loop hands them to the preprocessor: float32 in [0, 1]."""
    for key in cameras:
        if key in batch and batch[key].dtype == torch.uint8:
            batch[key] = batch[key].to(torch.float32) / 255
    return batch
