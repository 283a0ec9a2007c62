"""How losses become gradients: precision, accumulation over batches, several processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from craftcli.choices import Amp, Parallel
from craftcli.distributed import Processes
from craftcli.errors import EXIT_USAGE, CraftError

type Work = Callable[[], Tensor]
"""Computes a loss with the policy's modules."""

_AMP_DTYPES = {Amp.BF16: torch.bfloat16, Amp.FP16: torch.float16}


class Student(nn.Module):
    """Runs every use of a policy as a call of one module.

    DDP and FSDP2 only see calls of the module that they wrap. The task and the anchors use the
    policy in different ways, so all of them have to go through this module.
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, work: Work) -> Tensor:
        """The loss that the work computes."""
        return work()


class Execution:
    """Runs losses forward and backward, in one process or in one of several."""

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
        """Whether each process holds only a shard of the parameters and gradients."""
        return self.parallel is Parallel.FSDP and not self.processes.alone

    @property
    def scale(self) -> float:
        """The loss scale, which multiplies the gradients until `clip` removes it."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def accumulate(self, works: Sequence[Work]) -> Tensor:
        """Add the gradient of the mean loss to `.grad`; returns the mean over all processes."""
        losses = []
        for number, work in enumerate(works, start=1):
            with self._gradient_sync(number == len(works)):
                with self.autocast():
                    loss = self.student(work)
                share = loss / len(works)
                (share if self.scaler is None else self.scaler.scale(share)).backward()
            losses.append(loss.detach().float())
        return self.mean(torch.stack(losses).mean())

    @torch.no_grad()
    def measure(self, work: Work) -> Tensor:
        """Compute losses without gradients; returns their means over all processes."""
        with self.autocast():
            return self.mean(self.student(work).float())

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
        """Remove the loss scale and clip the gradient; returns its norm before clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        norm: Any = torch.nn.utils.clip_grad_norm_(self.student.parameters(), limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step(self, optimizer: Any, *, skip: bool) -> None:
        """Update the weights unless `skip`; drops the gradients in both cases."""
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
        """Release the wrapped policy; nothing can be run afterwards.

        Otherwise DDP outlives the connection and waits for it when the process ends.
        """
        self.student = nn.Identity()

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state)

    @contextmanager
    def _gradient_sync(self, last: bool) -> Iterator[None]:
        """Let the processes exchange gradients only in the last backward pass of several."""
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

        # Anchors and task use different parameters, and so do some batches.
        return DistributedDataParallel(student, find_unused_parameters=True)
    from torch.distributed.fsdp import fully_shard

    dtypes = {p.dtype for p in student.parameters()}
    if len(dtypes) > 1:
        raise CraftError(
            "This policy cannot be sharded.",
            why=f"FSDP2 needs parameters of one dtype; it has {', '.join(map(str, dtypes))}.",
            fix="use --parallel ddp, or a float32 policy with --amp bf16.",
            exit_code=EXIT_USAGE,
        )
    # As one unit: joint-attention policies never call their layers as modules, so FSDP2 would not
    # gather layers that were units of their own.
    fully_shard(student)
    return student
