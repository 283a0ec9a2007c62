"""How losses become gradients: precision, accumulation, and together with which processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from craftcli.cache.processes import Processes
from craftcli.choices import Amp, Parallel
from craftcli.errors import EXIT_USAGE, CraftError

type Work = Callable[[], Tensor]
"""Computes a loss with the policy's modules."""

_AMP_DTYPES = {Amp.BF16: torch.bfloat16, Amp.FP16: torch.float16}


class Student(nn.Module):
    """A policy whose every use is one call of this module.

    DDP and FSDP2 only see what goes through the forward of the module they wrap. A policy is used
    in several ways, for the task and for anchors, and all of them have to go through one module.
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, work: Work) -> Tensor:
        """Whatever the work computes."""
        return work()


class Execution:
    """Runs losses forward and backward, in one process or as one of several."""

    def __init__(
        self,
        policy: nn.Module,
        *,
        processes: Processes | None = None,
        amp: Amp = Amp.OFF,
        parallel: Parallel = Parallel.DDP,
    ) -> None:
        self.processes = processes or Processes()
        self.amp = amp
        self.parallel = parallel
        self.device = next(policy.parameters()).device
        self.student = _wrap(Student(policy), self.processes, parallel)
        fp16 = amp is Amp.FP16
        self.scaler = GradScaler(self.device.type) if fp16 else None

    @property
    def sharded(self) -> bool:
        """Whether parameters and gradients are spread over the processes."""
        return self.parallel is Parallel.FSDP and not self.processes.alone

    @property
    def scale(self) -> float:
        """What the gradients are multiplied with until they are clipped."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def accumulate(self, works: Sequence[Work]) -> Tensor:
        """Add the gradients of the mean of these losses to `.grad`; the mean over all processes."""
        losses = []
        for number, work in enumerate(works, start=1):
            with self._reducing(number == len(works)):
                with self.autocast():
                    loss = self.student(work)
                share = loss / len(works)
                (share if self.scaler is None else self.scaler.scale(share)).backward()
            losses.append(loss.detach().float())
        return self.mean(torch.stack(losses).mean())

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forward passes."""
        dtype = _AMP_DTYPES.get(self.amp)
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes."""
        return value if self.processes.alone else self.total(value) / self.processes.world

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.processes.alone:
            return value
        import torch.distributed as dist

        value = value.clone()
        dist.all_reduce(value)
        return value

    def clip(self, optimizer: Any, limit: float) -> float:
        """Clip the gradient to a norm, free of its loss scale; the norm before."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        norm: Any = torch.nn.utils.clip_grad_norm_(self.student.parameters(), limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step(self, optimizer: Any, *, skip: bool) -> None:
        """Update the weights, or `skip` that; drop the gradients either way."""
        if self.scaler is None:
            if not skip:
                optimizer.step()
        elif skip:
            self.scaler.update(self.scale * self.scaler.get_backoff_factor())
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad()

    def close(self) -> None:
        """Let go of the other processes; nothing can be run after this.

        Else DDP would outlive the connection, and wait for it when the process ends.
        """
        self.student = nn.Identity()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state)

    @contextmanager
    def _reducing(self, last: bool) -> Iterator[None]:
        """Share gradients between the processes only after the last backward pass of several."""
        student: Any = self.student
        if self.processes.alone or last:
            if self.sharded:
                student.set_requires_gradient_sync(True)
            yield
        elif self.sharded:
            student.set_requires_gradient_sync(False)
            yield
        else:
            with student.no_sync():
                yield


def _wrap(student: Student, processes: Processes, parallel: Parallel) -> nn.Module:
    if processes.alone:
        return student
    if parallel is Parallel.DDP:
        from torch.nn.parallel import DistributedDataParallel

        # Anchors use other parameters than the task does, and some batches fewer than others.
        return DistributedDataParallel(student, find_unused_parameters=True)
    from torch.distributed.fsdp import fully_shard

    dtypes = {p.dtype for p in student.parameters()}
    if len(dtypes) > 1:
        raise CraftError(
            "This policy cannot be sharded.",
            why=f"FSDP2 needs parameters of one dtype, and it has {', '.join(map(str, dtypes))}.",
            fix="use --parallel ddp, or a float32 policy with --amp bf16.",
            exit_code=EXIT_USAGE,
        )
    # As one unit: joint-attention policies never call their layers as modules, so that units of
    # layers would not be gathered for them.
    fully_shard(student)
    return student
