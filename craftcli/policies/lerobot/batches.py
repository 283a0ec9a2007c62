"""Reading rows of a LeRobot dataset: single ones, and endless batches in LeRobot's own order."""

import atexit
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, override

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard
from lerobot.datasets import EpisodeAwareSampler
from lerobot.utils.collate import lerobot_collate_fn
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate

from craftcli.distributed import Processes
from craftcli.errors import CraftError, explain_lost_worker, lost_worker_error
from craftcli.policies.base import Batch
from craftcli.policies.lerobot.weighted_sampler import WeightedSampler

REMEMBER_BYTES = 512 * 2**20
"""Largest size in memory of a dataset that keeps its items once they were read."""


class TaskBatches:
    """Endless raw batches, in the order in which LeRobot's own training draws them.

    Several datasets without weights are drawn from as if they were one; with weights, by these.
    With several processes, each gets its share, divided as accelerate does. `position` continues
    where an earlier run stopped (see the property of that name).
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
        sampler = _sampler(dataset, drop_last_frames, seed)
        self._frames = len(sampler)
        self._rows_per_step = batch_size * own.world
        self._epoch, self._start = 0, 0
        if position is not None:
            sampler.load_state_dict(dict(position))
            self._epoch, self._start = position["epoch"], position["start_index"]
        batches: Any = BatchSampler(sampler, batch_size, drop_last=False)
        if not own.alone:
            batches = BatchSamplerShard(batches, num_processes=own.world, process_index=own.rank)
        self._loader: DataLoader[Batch] = DataLoader(
            Items(dataset) if workers else remember_if_small(dataset),
            batch_sampler=batches,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context="spawn" if workers else None,
            pin_memory=torch.cuda.is_available(),
            collate_fn=_collate(meta),
        )

    @property
    def position(self) -> dict[str, int]:
        """Where the next batch begins: the number of the epoch, and the frame within it."""
        if self._start >= self._frames:
            return {"epoch": self._epoch + 1, "start_index": 0}
        return {"epoch": self._epoch, "start_index": self._start}

    def __iter__(self) -> Iterator[Batch]:
        # Now, because the process may have been forked since the loader was made.
        self._loader.worker_init_fn = partial(_end_without, os.getpid())
        if self._loader.num_workers:
            atexit.register(self.close)
        while True:
            with _signals_held():
                batches = iter(self._loader)
            for batch in _explained(batches):
                self._start += self._rows_per_step
                yield float_images(batch, self._cameras)
            self._epoch, self._start = self._epoch + 1, 0

    def close(self) -> None:
        """End the worker processes.

        They ignore SIGTERM, with which Python ends such processes when it exits itself: it would
        wait for them for ever.
        """
        atexit.unregister(self.close)
        # Only a loader with workers has one.
        batches: Any = self._loader._iterator
        self._loader._iterator = None
        if batches is None:
            return
        batches._shutdown_workers()
        for worker in batches._workers:
            worker.kill()  # torch waits some seconds for one that is busy, then sends SIGTERM
            worker.join()


def _sampler(dataset: Any, drop_last_frames: int, seed: int) -> Any:
    """LeRobot's own sampler, or one that draws by the weights of several datasets."""
    meta = dataset.meta
    parts = getattr(dataset, "parts", ())
    frames = [usable_frames(part, drop_last_frames) for part in parts]
    if parts and dataset.is_weighted:
        counted = [own + int(first) for own, first in zip(frames, dataset.offsets, strict=False)]
        return WeightedSampler(counted, shares=dataset.shares, seed=seed)
    return EpisodeAwareSampler(
        meta.episodes["dataset_from_index"],
        meta.episodes["dataset_to_index"],
        episode_indices_to_use=dataset.episodes,
        drop_n_last_frames=drop_last_frames,
        shuffle=True,
        seed=seed,
        absolute_to_relative_idx=dataset.absolute_to_relative_idx,
    )


def usable_frames(dataset: Any, drop_last_frames: int) -> NDArray[np.int64]:
    """The frames of one of several datasets that LeRobot's sampler would use.

    Raises:
        CraftError: there are none.
    """
    episodes = dataset.meta.episodes
    edges = zip(episodes["dataset_from_index"], episodes["dataset_to_index"], strict=True)
    ranges = [np.arange(first, end - drop_last_frames, dtype=np.int64) for first, end in edges]
    frames: NDArray[np.int64] = np.concatenate([np.zeros(0, dtype=np.int64), *ranges])
    if not len(frames):
        raise CraftError(
            f"Cannot train on the dataset {dataset.repo_id}: no frame is left.",
            why=f"the policy leaves out the last {drop_last_frames} frames of each episode; none "
            "is longer.",
            fix="leave the dataset out, or record longer episodes.",
        )
    return frames


def _explained(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches. An error of a worker process, passed on as text, is raised as it was."""
    try:
        yield from batches
    except RuntimeError as error:
        if found := re.search(r"CraftError: (.*) Why: (.*) Fix: (.*)", str(error)):
            raise CraftError(found[1], why=found[2], fix=found[3]) from error
        if lost := explain_lost_worker(error):
            raise lost from error
        raise
    except (ConnectionError, EOFError) as error:
        # It ended while a batch was on its way, and torch has not noticed that it is gone.
        raise lost_worker_error(f"{type(error).__name__}: {error}") from error


def _end_without(parent: int, worker: int) -> None:
    """End a worker if its training process has been killed: torch would let it wait forever."""
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Processes that start here never see SIGINT and SIGTERM, which go to a whole group.

    The training process alone decides when to end: it saves first, and then ends its workers.
    They inherit what is blocked. A signal to this process is delivered when the block ends.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows has no such signals
        yield
        return
    # Python's tracker unblocks both signals when it starts: it must not start within.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def read_rows(dataset: Any, rows: list[int]) -> Batch:
    """Read these rows as one raw batch, in this order."""
    meta = dataset.meta
    return float_images(_collate(meta)([read_item(dataset, row) for row in rows]), meta.camera_keys)


def read_item(dataset: Any, row: int) -> Batch:
    """Read one row of a LeRobotDataset.

    Raises:
        CraftError: names the frame, and the image or video that cannot be decoded.
    """
    try:
        item: Batch = dataset[row]
    except CraftError:
        raise
    except Exception as error:  # the decoders of images and videos raise many kinds
        lines = str(error).strip().splitlines()
        raise CraftError(
            f"Cannot read frame {row} of the dataset {dataset.root}.",
            why=f"{_unreadable_image(dataset, row)}{type(error).__name__}: "
            f"{lines[0] if lines else 'no message'}.",
            fix="record or download the dataset again, or remove the episode "
            "(lerobot-edit-dataset).",
        ) from error
    return item


def _unreadable_image(dataset: Any, row: int) -> str:
    """The first image of the frame's episode that cannot be decoded; empty if all can be."""
    stored = dataset.hf_dataset
    episodes = stored.data.column("episode_index").to_numpy()
    for name in dataset.meta.image_keys:
        column = stored.select_columns([name])
        # LeRobot decodes the images of other frames, too, where it reads their actions.
        for other in [row, *np.flatnonzero(episodes == episodes[row]).tolist()]:
            try:
                column[other]
            except Exception:
                return f"the column {name} of frame {other} cannot be decoded. "
    return ""


def stack_observations(values: Sequence[Any]) -> Any:
    """One feature of several observations of a simulator, as LeRobot's preprocessors take it.

    Images [..., H, W, 3] uint8 become [..., 3, H, W] float32 in [0, 1]; texts stay a list.
    """
    if isinstance(values[0], str):
        return list(values)
    stacked = torch.from_numpy(np.stack(values))
    if stacked.dtype == torch.uint8:
        return stacked.movedim(-1, -3).contiguous().float() / 255
    return stacked


class Items(Dataset[Batch]):
    """The rows of a LeRobotDataset, with errors that name the frame."""

    def __init__(self, dataset: Any) -> None:
        self.meta = dataset.meta
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Batch:
        return read_item(self._dataset, index)


class Remembered(Items):
    """A dataset that keeps its items in memory once they were read.

    LeRobot decodes an image for every action step of an item. The demo's items take 6 ms each, more
    than a training step; from memory they are free. Only for datasets that fit easily.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._items: dict[int, Batch] = {}

    def __getattr__(self, name: str) -> Any:
        """Everything else that a LeRobotDataset has."""
        if name == "_dataset":  # not yet constructed
            raise AttributeError(name)
        return getattr(self._dataset, name)

    @override
    def __getitem__(self, index: int) -> Batch:
        if index not in self._items:
            self._items[index] = super().__getitem__(index)
        return self._items[index]


def remember_if_small(dataset: Any) -> Any:
    """Keep items in memory if all of them together stay below `REMEMBER_BYTES`."""
    one = read_item(dataset, 0)
    size = sum(v.nbytes for v in one.values() if isinstance(v, torch.Tensor))
    return Remembered(dataset) if size * len(dataset) <= REMEMBER_BYTES else Items(dataset)


def float_images(batch: Batch, cameras: list[str]) -> Batch:
    """Convert images to float32 in [0, 1], as LeRobot's training loop does before preprocessing."""
    for key in cameras:
        if key in batch and batch[key].dtype == torch.uint8:
            batch[key] = batch[key].to(torch.float32) / 255
    return batch


def _collate(meta: Any) -> Callable[[list[Batch]], Batch]:
    """The function that makes a batch of rows; it drops LeRobot's optional text annotations."""
    chosen: Callable[[list[Batch]], Batch]
    chosen = lerobot_collate_fn if meta.has_language_columns else default_collate
    return chosen
