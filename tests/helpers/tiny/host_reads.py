"""Counts how often the host waits for values of the device, on a machine without a GPU.

On a CPU nothing waits, but the calls that would wait on a GPU are the same. torch shows some of
them to a dispatch mode, and those that read the memory of a CPU tensor only to a function mode.
"""

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_DISPATCHED = {
    torch.ops.aten._local_scalar_dense.default,  # item(), float(), int(), bool()
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.nonzero.default,
}
"""Operators that read values: scalars, and those whose result has a size that values decide."""
_CALLED = {Tensor.tolist, Tensor.cpu, Tensor.numpy}
"""Methods that copy to the host."""


class HostReads(Counter[str]):
    """The number of reads, by who asked for them: `craft`, `lerobot` or `torch`."""


@contextmanager
def counted_reads() -> Iterator[HostReads]:
    """Count reads while the block runs."""
    reads = HostReads()
    with _Functions(reads), _Dispatched(reads):
        yield reads


class _Functions(TorchFunctionMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _CALLED:
            _count(self._reads)
        return func(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in _DISPATCHED or by_mask:
            _count(self._reads)
        return func(*args, **(kwargs or {}))


def _count(reads: HostReads) -> None:
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(2))]
    # An optimizer's counters of steps are on the host, whatever the device.
    if any("/torch/optim/" in file for file in files):
        return
    owners = (_owner(file) for file in files)
    reads[next((owner for owner in owners if owner), "torch")] += 1


def _owner(file: str) -> str | None:
    for package, owner in (("/craftcli/", "craft"), ("/lerobot/", "lerobot")):
        if package in file:
            return owner
    return None
