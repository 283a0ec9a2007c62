"""Retention inside the user's own training loop, with or without accelerate.

`Retention.open` uses this module: the loop has prepared the policy, and craft adapts to it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, override

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from craftcli.choices import Amp
from craftcli.distributed import Processes
from craftcli.engine.execution import Execution, Work
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import Policy
from craftcli.policies.families.registry import adapter_for
from craftcli.policies.lerobot.checkpoint import Checkpoint


class LoopExecution(Execution):
    """Computes retention gradients in a loop that has prepared the policy itself.

    The loop may have wrapped the policy for several processes. Anchors bypass that wrapper, so
    their gradients are averaged over the processes here.
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
    def _gradient_sync(self, last: bool) -> Iterator[None]:
        yield

    def _average_gradients(self) -> None:
        import torch.distributed as dist

        parameters = [p for p in self.student.parameters() if p.requires_grad]
        present = torch.tensor([p.grad is not None for p in parameters], device=self.device)
        gradients = []
        for parameter, reached in zip(parameters, self.total(present.int()).tolist(), strict=True):
            if reached:
                if parameter.grad is None:  # only anchors of other processes reach it
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        for pending in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            pending.wait()
        torch._foreach_div_(gradients, self.processes.world)


def loop_execution(
    policy: nn.Module, accelerator: Any, *, amp: Amp, scaler: GradScaler | None
) -> LoopExecution:
    """The execution of a loop; accelerate's settings, if the loop uses it, replace the others."""
    if accelerator is not None:
        amp, scaler = _precision(accelerator), accelerator.scaler
    return LoopExecution(policy, amp=amp, scaler=scaler)


def loop_student(policy: Checkpoint | Policy, preprocess: Any) -> Checkpoint:
    """The policy as a checkpoint; a bare policy in memory needs its preprocessor."""
    if isinstance(policy, Checkpoint):
        return policy
    if preprocess is None:
        raise CraftError(
            "Retention needs the policy's preprocessor.",
            why="anchors are prepared in the same way as the teacher's inputs.",
            fix="pass preprocess=..., or pass the result of load_checkpoint as the policy.",
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
    """The precision of accelerate's forward passes."""
    name = str(accelerator.mixed_precision)
    if name == "no":
        return Amp.OFF
    if name not in list(Amp):
        raise CraftError(
            f"Retention cannot be computed in {name}.",
            why="craft supports accelerate's mixed precisions no, bf16 and fp16.",
            fix="use Accelerator(mixed_precision='bf16').",
            exit_code=EXIT_USAGE,
        )
    return Amp(name)


def _connected() -> Processes:
    """This process among those that the loop has connected with torch.distributed."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Processes()
    return Processes(rank=dist.get_rank(), world=dist.get_world_size())


def _require_whole(policy: nn.Module) -> None:
    """Refuse a sharded policy."""
    # DeepSpeed's parameters have ds_id; FSDP2's are DTensors, which have to_local.
    marks = ("ds_id", "to_local")
    if any(hasattr(p, mark) for p in policy.parameters() for mark in marks):
        raise CraftError(
            "Retention cannot be added to this loop.",
            why="its policy is sharded (FSDP or DeepSpeed), and anchors need the whole policy.",
            fix="use DDP, or craft train --parallel fsdp.",
            exit_code=EXIT_USAGE,
        )
