"""The most memory that was in use at once."""

import resource
import sys
from pathlib import Path

import torch

# Linux: writing 5 sets the peak of the process back to what it uses now.
_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far, on the GPU if the device is one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.is_file():
        (line,) = (text for text in _STATUS.read_text("ascii").splitlines() if "VmHWM" in text)
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, other systems kibibytes.
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak_memory(device: torch.device) -> None:
    """Count from here on, where the system can: several runs may share a process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET.exists():
        _RESET.write_text("5", encoding="ascii")
