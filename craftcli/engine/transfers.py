"""Copies between the host and the device of a policy: few of them, and none that waits in vain.

A GPU works through a queue that the host fills. Reading a value makes the host wait until the queue
is empty, and so does a plain copy to the GPU. A step therefore reads all its values at once
(`read_together`), and copies inputs from memory that the GPU reads by itself (`to_device`).
"""

import itertools

import torch
from torch import Tensor

from craftcli.engine.method.gradients import widest_float


def read_together(*tensors: Tensor) -> list[list[float]]:
    """The values of several tensors, flattened, in one transfer; the first decides the device."""
    device = tensors[0].device
    wide = widest_float(device)
    flat = torch.cat([tensor.detach().flatten().to(device, wide) for tensor in tensors])
    values: list[float] = flat.tolist()
    ends = [0]
    for tensor in tensors:
        ends.append(ends[-1] + tensor.numel())
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device; the host does not wait for a GPU.

    The copy runs in the queue of the calling thread, so what is queued later sees it complete.
    """
    if device.type != "cuda":
        return tensor.to(device)
    # Only from pinned memory can the GPU copy by itself, while the host goes on. PyTorch keeps the
    # pinned memory until the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)
