"""A teacher that answers while the student is trained, instead of a cache of its answers."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from craftcli.config.train import TrainConfig
from craftcli.engine.retention.terms import evaluation_mode
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.lora import lora_switched_off
from craftcli.sources import open_policy


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveTeacher:
    """The policy before fine-tuning: a copy of it, or the student without its LoRA weights."""

    checkpoint: Checkpoint
    """The policy that answers, and the files of the teacher's weights."""
    copied: bool
    """Whether it has weights of its own."""

    @property
    def copied_bytes(self) -> int:
        """Memory of the copy; 0 if there is none."""
        weights = self.checkpoint.policy.parameters() if self.copied else ()
        return sum(parameter.nbytes for parameter in weights)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Run the policy as the teacher: without gradients, dropout and LoRA weights.

        The precision is that of the context, so that the student's rounding is the teacher's too.
        """
        off = nullcontext() if self.copied else lora_switched_off(self.checkpoint)
        with torch.no_grad(), evaluation_mode(self.checkpoint.policy), off:
            yield


def open_live_teacher(config: TrainConfig, student: Checkpoint) -> LiveTeacher:
    """The teacher of a new or a resumed run.

    LoRA weights that the run began with are the only ones that it trains: without them the student
    is its teacher. In all other cases the teacher is opened from its files.
    """
    if config.lora is not None and _trains_lora_alone(student):
        # The checkpoint of a resumed run names the folder of the policy under its LoRA weights.
        folder = student.base or student.folder
        teacher = dataclasses.replace(student, folder=folder, base=None, source=config.policy)
        return LiveTeacher(checkpoint=teacher, copied=False)
    teacher = open_policy(config)
    teacher.policy.requires_grad_(False)
    teacher.policy.eval()
    return LiveTeacher(checkpoint=teacher, copied=True)


def _trains_lora_alone(student: Checkpoint) -> bool:
    named = student.policy.named_parameters()
    return student.peft is not None and all("lora_" in n for n, p in named if p.requires_grad)
