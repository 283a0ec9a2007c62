"""Retention inside a training loop that is not craft's: the user's own, or one with accelerate."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, override

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from craftcli.cache.processes import Processes
from craftcli.choices import Amp
from craftcli.config import RetentionConfig, TrainConfig
from craftcli.engine.compatibility import require_self_check, self_check
from craftcli.engine.execution import Execution, Work
from craftcli.engine.opening import open_retention
from craftcli.engine.retention import Retention
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.locations import Location
from craftcli.policies.base import Policy
from craftcli.policies.loading import Checkpoint
from craftcli.policies.registry import adapter_for


class LoopExecution(Execution):
    """Retention gradients beside the task gradients of a loop that has prepared the policy itself.

    The loop may have wrapped the policy for several processes. Anchors do not go through that
    wrapper, so that it shares nothing of theirs; their gradients are averaged here.
    """

    def __init__(
        self, policy: nn.Module, *, amp: Amp = Amp.OFF, scaler: GradScaler | None = None
    ) -> None:
        super().__init__(policy, amp=amp)
        self.scaler = scaler
        self.processes = _connected()
        _require_whole(policy)

    @override
    def accumulate(self, works: Sequence[Work]) -> Tensor:
        loss = super().accumulate(works)
        if not self.processes.alone:
            self._average_gradients()
        return loss

    @override
    @contextmanager
    def _reducing(self, last: bool) -> Iterator[None]:
        yield

    def _average_gradients(self) -> None:
        import torch.distributed as dist

        parameters = [p for p in self.student.parameters() if p.requires_grad]
        present = torch.tensor([p.grad is not None for p in parameters], device=self.device)
        gradients = []
        for parameter, reached in zip(parameters, self.total(present.int()).tolist(), strict=True):
            if reached:
                if parameter.grad is None:  # only the anchors of other processes reach it
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        for pending in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            pending.wait()
        torch._foreach_div_(gradients, self.processes.world)


def open_in_loop(
    cache: Location,
    policy: Checkpoint | Policy,
    config: RetentionConfig,
    *,
    total_steps: int,
    preprocess: Any,
    accelerator: Any,
    amp: Amp,
    scaler: GradScaler | None,
    seed: int,
    anchor_root: str | None,
    other_student: bool,
) -> Retention:
    """What `Retention.open` returns; its parameters are explained there."""
    if not config.retains:
        raise CraftError(
            "There is nothing to retain.",
            why="the mode is none.",
            fix="leave Retention out of the loop, or choose another mode.",
            exit_code=EXIT_USAGE,
        )
    is_file = isinstance(policy, Checkpoint)
    student = policy if isinstance(policy, Checkpoint) else _in_memory(policy, preprocess)
    chosen = {field.name: getattr(config, field.name) for field in fields(config)}
    settings = TrainConfig(
        **chosen,
        steps=total_steps,
        seed=seed,
        anchor_root=anchor_root,
        # Of a policy in memory the files are unknown; that it is the teacher is seen below.
        other_student=other_student or not is_file,
    )
    retention = open_retention(settings, student, cache)
    if accelerator is not None:
        amp, scaler = _precision(accelerator), accelerator.scaler
    retention.execution = LoopExecution(student.policy, amp=amp, scaler=scaler)
    check = None if other_student else self_check(retention)
    if check is not None:
        require_self_check(check)
    return retention


def _in_memory(policy: Policy, preprocess: Any) -> Checkpoint:
    if preprocess is None:
        raise CraftError(
            "Retention needs the policy's preprocessor.",
            why="anchors are prepared for the policy as the teacher's were.",
            fix="pass preprocess=..., or what load_checkpoint returned in place of the policy.",
            exit_code=EXIT_USAGE,
        )
    return Checkpoint(
        policy=policy,
        preprocess=preprocess,
        postprocess=None,
        adapter=adapter_for(policy.config.type),
        folder=Path(),
        source="a policy in memory",
        revision=None,
    )


def _precision(accelerator: Any) -> Amp:
    """The precision that accelerate runs forward passes in."""
    name = str(accelerator.mixed_precision)
    if name == "no":
        return Amp.OFF
    if name not in list(Amp):
        raise CraftError(
            f"Retention cannot be computed in {name}.",
            why="of accelerate's mixed precisions craft knows no, bf16 and fp16.",
            fix="use Accelerator(mixed_precision='bf16').",
            exit_code=EXIT_USAGE,
        )
    return Amp(name)


def _connected() -> Processes:
    """This process among those that the loop has connected."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Processes()
    return Processes(rank=dist.get_rank(), world=dist.get_world_size())


def _require_whole(policy: nn.Module) -> None:
    """Refuse a policy of which this process holds a part."""
    # DeepSpeed marks its parameters so, FSDP2 makes DTensors of them.
    marks = ("ds_id", "to_local")
    if any(hasattr(p, mark) for p in policy.parameters() for mark in marks):
        raise CraftError(
            "Retention cannot be added to this loop.",
            why="its policy is sharded (FSDP or DeepSpeed), and anchors need the whole of it.",
            fix="use DDP, or craft train --parallel fsdp.",
            exit_code=EXIT_USAGE,
        )
