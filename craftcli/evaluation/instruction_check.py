"""Whether a policy still listens: how much its actions change when only the instruction does.

The same frames are shown twice, under their own instruction and under another one. A policy that
was fine-tuned on one instruction may stop reading it; its losses and its drift do not show that.
No simulator is needed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from craftcli.evaluation.dataset_loss import choose_frames
from craftcli.evaluation.results import InstructionEffect
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.history import recall
from craftcli.policies.lerobot.instructions import instructions_of, reads_instructions

FRAMES = 32
"""Frames of each dataset; few, because policies that decode token by token are slow."""


def reason_to_skip(policy: Checkpoint, instructions: Sequence[str]) -> str | None:
    """Why the check says nothing here; None if it can be made."""
    if not reads_instructions(policy):
        return f"policies of type {policy.policy_type} read no instructions"
    if len(instructions) < 2:
        return "only one instruction is known; name a dataset with others too, with --dataset"
    return None


def known_instructions(datasets: Sequence[Any]) -> list[str]:
    """The instructions of opened datasets, each once."""
    return list(dict.fromkeys(task for data in datasets for task in instructions_of(data)))


def measure_effect(
    policy: Checkpoint,
    teacher: Checkpoint | None,
    dataset: Any,
    instructions: Sequence[str],
    *,
    seed: int,
    group: str | None = None,
    samples: int = FRAMES,
    batch_size: int = FRAMES,
    on_frames: Callable[[int], None] = lambda _: None,
) -> InstructionEffect:
    """Change the instructions of some frames, each to the next one in the list.

    `teacher` is the policy before fine-tuning, if it is known.
    """
    frames = choose_frames(policy, dataset, seed=seed, samples=min(samples, FRAMES)).tolist()
    effects = []
    for which in (policy, teacher):
        if which is not None:
            effects.append(_effect(which, dataset, frames, instructions, seed, batch_size))
            on_frames(len(frames))
    return InstructionEffect(
        dataset=dataset.repo_id,
        group=group,
        frames=len(frames),
        policy=effects[0],
        teacher=effects[1] if teacher is not None else None,
    )


def other_instruction(own: str, instructions: Sequence[str]) -> str:
    """The instruction after a frame's own in the list; the first one follows the last.

    >>> other_instruction("b", ["a", "b"])
    'a'
    """
    place = instructions.index(own) if own in instructions else -1
    return instructions[(place + 1) % len(instructions)]


@torch.no_grad()
def _effect(
    policy: Checkpoint,
    dataset: Any,
    frames: list[int],
    instructions: Sequence[str],
    seed: int,
    batch_size: int,
) -> float | None:
    """The squared change of the actions, as a share of their variance; None if that is 0."""
    policy.policy.eval()
    own, other = [], []
    with torch.random.fork_rng():
        for start in range(0, len(frames), batch_size):
            raw = read_rows(dataset, frames[start : start + batch_size])
            tasks = [other_instruction(str(task), instructions) for task in raw["task"]]
            # Policies that draw noise draw the same for both.
            own.append(_actions(policy, raw, seed + start))
            other.append(_actions(policy, {**raw, "task": tasks}, seed + start))
    before, after = torch.cat(own), torch.cat(other)
    # Over frames and steps of the chunk, for each dimension of an action.
    variance = before.flatten(0, 1).var(0, unbiased=False).mean()
    return ((after - before).square().mean() / variance).item() if variance > 0 else None


def _actions(policy: Checkpoint, raw: dict[str, Any], seed: int) -> Tensor:
    """The action chunks of a batch, [frames, steps, dims], in robot units."""
    torch.manual_seed(seed)
    policy.policy.reset()
    batch = policy.preprocess(raw)
    chunk: Tensor = policy.policy.predict_action_chunk(recall(policy.policy, batch))
    actions: Tensor = policy.postprocess(chunk).cpu().float()
    return actions
