"""The student's actions beside its teacher's, for caches that do not hold the teacher's own."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from craftcli.cache.format import Manifest
from craftcli.cache.matching import match_teacher, teacher_at_hand
from craftcli.cache.reader import CacheReader
from craftcli.config import DEMO
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.engine.anchor_rows import AnchorRows, open_anchor_rows
from craftcli.errors import CraftError
from craftcli.evaluation.findings import ActionError
from craftcli.policies.history import recall
from craftcli.policies.identity import teacher_identity
from craftcli.policies.loading import Checkpoint, load_checkpoint

ROWS = 64
"""Frames compared: a policy that decodes token by token takes its time for each."""


def open_teacher(
    manifest: Manifest,
    *,
    device: str,
    renames: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """The teacher of a cache, if it is still where it was, opened as its student was.

    Raises:
        CraftError: it is not there, or it has changed.
    """
    source = teacher_at_hand(manifest)
    if source is None:
        raise _no_teacher(manifest, "it is no folder here")
    folder = str(TEACHER_FOLDER) if source == DEMO else source
    teacher = load_checkpoint(
        folder,
        device=device,
        revision=manifest.teacher.revision,
        renames=renames,
        trust_remote_code=trust_remote_code,
    )
    matches = match_teacher(manifest, teacher_identity(teacher))
    changed = [match.field for match in matches if not match.matches]
    if changed:
        raise _no_teacher(manifest, f"{', '.join(changed)} differ from those in the cache")
    return teacher


def compare_actions(
    student: Checkpoint,
    teacher: Checkpoint,
    reader: CacheReader,
    *,
    seed: int,
    batch_size: int,
    anchor_root: str | None = None,
) -> ActionError:
    """The nmse of the action chunks that come out, each policy with its own processors."""
    identity = reader.manifest.dataset
    frames = _spread(reader)
    both = [
        chosen_actions(
            policy,
            open_anchor_rows(identity, policy, root=anchor_root),
            frames,
            seed=seed,
            batch_size=batch_size,
        )
        for policy in (student, teacher)
    ]
    ours, theirs = both
    # Over frames and steps of the chunk, for every part of an action by itself.
    variance = theirs.flatten(0, 1).var(0, unbiased=False).mean()
    if not variance > 0:
        raise CraftError(
            "The actions of the policy cannot be compared with its teacher's.",
            why="the teacher does the same on all frames, so that there is no scale.",
            fix="use a cache of frames that differ.",
        )
    value = (ours - theirs).square().mean() / variance
    return ActionError(kind="chunk_nmse", value=value.item(), rows=len(frames))


@torch.no_grad()
def chosen_actions(
    policy: Checkpoint, data: AnchorRows, frames: Sequence[int], *, seed: int, batch_size: int
) -> Tensor:
    """The chunks that a policy acts out on these frames, [rows, steps, parts], in robot units."""
    policy.policy.eval()
    chunks = []
    with torch.random.fork_rng():
        for start in range(0, len(frames), batch_size):
            batch = data.read_labelled(list(frames[start : start + batch_size]))
            # The same noise for both, where a policy draws some.
            torch.manual_seed(seed + start)
            policy.policy.reset()
            chunk = policy.policy.predict_action_chunk(recall(policy.policy, batch))
            chunks.append(policy.postprocess(chunk).cpu())
    return torch.cat(chunks).float()


def _spread(reader: CacheReader) -> list[int]:
    """Frames of valid rows from all over the cache."""
    rows = np.flatnonzero(reader.read_all("valid"))
    chosen = np.unique(np.linspace(0, len(rows) - 1, ROWS).round().astype(int))
    frames: list[int] = reader.read("index/dataset_index", rows[chosen]).tolist()
    return frames


def _no_teacher(manifest: Manifest, why: str) -> CraftError:
    return CraftError(
        "The cache's teacher is not at hand.",
        why=f"{manifest.teacher.source}: {why}.",
        fix="put it back, or build the cache with --kind hidden+action: it then holds what the "
        "teacher predicts.",
    )
