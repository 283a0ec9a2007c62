"""Compares a student's actions with its teacher's by running both: the cache need not hold them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from craftcli.cache.reading.reader import CacheReader
from craftcli.engine.retention.anchor_dataset import AnchorDataset, open_anchor_dataset
from craftcli.errors import CraftError
from craftcli.evaluation.cache_check import spread_rows
from craftcli.evaluation.results import ActionError
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.history import recall

ROWS = 64
"""How many frames are compared; few, because policies that decode token by token are slow."""


def compare_actions(
    student: Checkpoint,
    teacher: Checkpoint,
    reader: CacheReader,
    *,
    seed: int,
    batch_size: int,
    anchor_root: str | None = None,
) -> ActionError:
    """The nmse between the action chunks of student and teacher, each with its own processors."""
    frames = _spread_frames(reader)
    both = [
        predict_actions(
            policy,
            open_anchor_dataset(reader.manifest.parts, policy, root=anchor_root),
            frames,
            seed=seed,
            batch_size=batch_size,
        )
        for policy in (student, teacher)
    ]
    ours, theirs = both
    # Over frames and steps of the chunk, for each dimension of an action.
    variance = theirs.flatten(0, 1).var(0, unbiased=False).mean()
    if not variance > 0:
        raise CraftError(
            "The policy's actions cannot be compared with its teacher's.",
            why="the teacher's actions are the same on all frames, so their variance is 0.",
            fix="use a cache of frames that differ.",
        )
    value = (ours - theirs).square().mean() / variance
    return ActionError(kind="chunk_nmse", value=value.item(), rows=len(frames))


@torch.no_grad()
def predict_actions(
    policy: Checkpoint, data: AnchorDataset, frames: Sequence[int], *, seed: int, batch_size: int
) -> Tensor:
    """The action chunks of a policy on these frames, [frames, steps, dims], in robot units."""
    policy.policy.eval()
    chunks = []
    with torch.random.fork_rng():
        for start in range(0, len(frames), batch_size):
            batch = data.read_labelled(list(frames[start : start + batch_size]))
            # Policies that draw noise draw the same for student and teacher.
            torch.manual_seed(seed + start)
            policy.policy.reset()
            chunk = policy.policy.predict_action_chunk(recall(policy.policy, batch))
            chunks.append(policy.postprocess(chunk).cpu())
    return torch.cat(chunks).float()


def _spread_frames(reader: CacheReader) -> list[int]:
    """Frames of valid rows, spread evenly over the cache."""
    rows = np.asarray(spread_rows(reader, ROWS))
    frames: list[int] = reader.read("index/dataset_index", rows).tolist()
    return frames
