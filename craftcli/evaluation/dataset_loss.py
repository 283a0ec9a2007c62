"""A policy's own training loss on a dataset, over all frames and by task."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from craftcli.errors import CraftError
from craftcli.evaluation.results import DatasetLoss
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.identity import dataset_identity


@torch.no_grad()
def dataset_loss(
    checkpoint: Checkpoint,
    dataset: Any,
    *,
    seed: int,
    group: str | None = None,
    samples: int = 512,
    batch_size: int = 32,
    on_frames: Callable[[int], None] = lambda _: None,
) -> DatasetLoss:
    """The loss that LeRobot trains the policy with, measured in evaluation mode.

    `samples` frames are drawn, or all if there are fewer; the same frames for every policy.
    """
    tasks = dataset.hf_dataset.data.column("task_index").to_numpy()
    chosen = choose_frames(checkpoint, dataset, seed=seed, samples=samples)
    by_task: dict[str, float] = {}
    total = 0.0
    for task in np.unique(tasks[chosen]):
        rows = chosen[tasks[chosen] == task].tolist()
        task_loss = _sum_of_losses(checkpoint, dataset, rows, seed, batch_size, on_frames)
        by_task[str(dataset[rows[0]]["task"])] = task_loss / len(rows)
        total += task_loss
    return DatasetLoss(
        dataset=dataset.repo_id,
        fingerprint=dataset_identity(dataset, []).fingerprint,
        group=group,
        frames=len(chosen),
        seed=seed,
        mean=total / len(chosen),
        by_task=by_task,
    )


def choose_frames(
    checkpoint: Checkpoint, dataset: Any, *, seed: int, samples: int
) -> NDArray[np.intp]:
    """Draw frames that the policy could be trained on, without repetition, in ascending order."""
    usable = np.ones(len(dataset), dtype=bool)
    # As in training: some families leave out an episode's last frames, because their action
    # chunks run past its end.
    drop = getattr(checkpoint.policy.config, "drop_n_last_frames", 0)
    for end in dataset.meta.episodes["dataset_to_index"] if drop else ():
        usable[max(end - drop, 0) : end] = False
    frames = np.flatnonzero(usable)
    if not len(frames):
        raise CraftError(
            f"Cannot evaluate on the dataset {dataset.repo_id}: no frame is left.",
            why=f"the policy leaves out the last {drop} frames of each episode; none is longer.",
            fix="evaluate on longer episodes.",
        )
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(frames, size=min(samples, len(frames)), replace=False))


def _sum_of_losses(
    checkpoint: Checkpoint,
    dataset: Any,
    rows: list[int],
    seed: int,
    batch_size: int,
    on_frames: Callable[[int], None],
) -> float:
    """The loss of these frames, summed."""
    policy, total = checkpoint.policy, 0.0
    policy.eval()
    with torch.random.fork_rng():
        for start in range(0, len(rows), batch_size):
            piece = rows[start : start + batch_size]
            torch.manual_seed(seed + start)
            loss, _ = policy(checkpoint.preprocess(read_rows(dataset, piece)))
            total += len(piece) * loss.item()
            on_frames(len(piece))
    return total
