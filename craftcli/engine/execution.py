"""How losses become gradients: precision, accumulation over batches, several processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from craftcli.choices import Amp, Parallel
from craftcli.distributed import Processes
from craftcli.engine.method.gradients import local_shard, widest_float
from craftcli.engine.sharding import shard

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
        units: Sequence[nn.Module] = (),
    ) -> None:
        """`units` are the modules that FSDP2 gathers one at a time."""
        self.processes = processes or Processes()
        self.amp = amp
        self.parallel = parallel
        self.device = next(policy.parameters()).device
        self.student = _wrap(Student(policy), self.processes, parallel, units)
        fp16 = amp is Amp.FP16
        self.scaler = GradScaler(self.device.type) if fp16 else None

    @property
    def sharded(self) -> bool:
        """Whether each process holds only a shard of the parameters and gradients."""
        return self.parallel is Parallel.FSDP and not self.processes.alone

    @property
    def scale(self) -> Tensor:
        """The loss scale, on the device; it multiplies the gradients until `clip` removes it."""
        one = torch.ones((), device=self.device)
        return one if self.scaler is None else self.scaler.scale(one)

    def accumulate(self, works: Sequence[Work]) -> Tensor:
        """Add the gradient of the mean loss to `.grad`; returns the mean loss of this process."""
        losses = []
        for number, work in enumerate(works, start=1):
            with self._gradient_sync(number == len(works)):
                with self.autocast():
                    loss = self.student(work)
                share = loss / len(works)
                (share if self.scaler is None else self.scaler.scale(share)).backward()
            losses.append(loss.detach().float())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def measure(self, work: Work) -> Tensor:
        """Compute losses of this process without gradients."""
        with self.autocast():
            losses: Tensor = self.student(work).float()
        return losses

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forward passes."""
        dtype = _AMP_DTYPES.get(self.amp)
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()

    def reduce(self, means: Tensor, sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Average `means` and add up `sums` over all processes, in one exchange."""
        if sums is None:
            sums = means.new_empty(0)
        if self.processes.alone:
            return means, sums
        wide = widest_float(means.device)
        both = torch.cat([means.to(wide) / self.processes.world, sums.flatten().to(wide)])
        both = self.total(both)
        return both[: means.numel()], both[means.numel() :].view_as(sums)

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.processes.alone:
            return value
        import torch.distributed as dist

        value = value.clone()
        dist.all_reduce(value)
        return value

    def clip(self, optimizer: Any, limit: float, means: Tensor) -> tuple[Tensor, Tensor]:
        """Remove the loss scale and clip the gradient.

        Returns its norm before clipping, and `means` averaged over all processes. Both stay on the
        device, so that the host can read them together.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        parameters = [p for p in self.student.parameters() if p.grad is not None]
        gradients = [local_shard(p.grad) for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.sharded:
            # Of this process's shards; the squares add up, in the exchange that there is anyway.
            means, square = self.reduce(means, norm.to(widest_float(norm.device)).square())
            norm = square.sqrt().to(norm.dtype)
        else:
            means, _ = self.reduce(means)
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm, means

    def step(self, optimizer: Any, *, skip: bool) -> None:
        """Update the weights unless `skip`; drops the gradients in both cases."""
        if self.scaler is None:
            if not skip:
                optimizer.step()
        elif skip:
            self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
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
        """Let the processes exchange gradients only in the last backward pass of several.

        A sharded policy exchanges them in every one: it would have to keep whole gradients.
        """
        student: Any = self.student
        if self.processes.alone or self.sharded or last:
            yield
        else:
            with student.no_sync():
                yield


def _wrap(
    student: Student, processes: Processes, parallel: Parallel, units: Sequence[nn.Module]
) -> nn.Module:
    if processes.alone:
        return student
    if parallel is Parallel.DDP:
        from torch.nn.parallel import DistributedDataParallel

        # Anchors and task use different parameters, and so do some batches.
        return DistributedDataParallel(student, find_unused_parameters=True)
    shard(student, units)
    return student
