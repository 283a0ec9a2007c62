"""Loading a policy's weights without a second copy of them.

LeRobot fills a new policy with random numbers, in float32, then reads the whole file beside it. A
policy of 6 GB in bfloat16 needs 15 GiB in this way. In the block of `read_once`:

- large parameters are allocated and not filled: memory that is never written takes no space;
- the file's tensors are read when they are copied into the policy, one at a time.

LeRobot's own code builds the policy, renames tensors and copies them, so the result is the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from craftcli.errors import CraftError
from craftcli.patching import replaced
from craftcli.policies.lerobot.weight_files import WeightsFile

LARGE = 2**16
"""Parameters with at least as many numbers are not filled; for smaller ones it is not worth it."""
_FILLING = frozenset(
    [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    # Of these the functions of `nn.init` are made.
    + ["random_", "fill_", "zero_", "erfinv_", "mul_", "add_", "clamp_"]
)


class Unfilled(TorchFunctionMode):
    """Leaves large parameters as they were allocated, until `copy_` gives them values."""

    def __init__(self) -> None:
        super().__init__()
        self._left: dict[int, nn.Parameter] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")
        if isinstance(target, nn.Parameter) and target.numel() >= LARGE:
            if name in _FILLING:
                self._left[id(target)] = target
                return target
            if name == "copy_":
                self._left.pop(id(target), None)
        return func(*args, **kwargs)

    def is_left(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter was to be filled, and has no values from a file."""
        return id(parameter) in self._left


class SavedTensor(Tensor):
    """A tensor of a file that is read whenever something is computed with it, and not kept."""

    _read: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, like: Tensor, read: Callable[[], Tensor]) -> "SavedTensor":
        """A tensor that `read` reads, with the shape and the dtype of `like`."""
        made: SavedTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=torch.device("cpu")
        )
        made._read = read
        return made

    # Without it every attribute would go through Python twice.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a plain function
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with what is in the file; a copy or a view of all of it stays unread."""
        aten = torch.ops.aten
        if func in (aten.clone.default, aten.detach.default, aten.alias.default):
            return cls(args[0], args[0]._read)
        args, kwargs = tree_map(_read, (args, kwargs or {}))
        return func(*args, **kwargs)


def _read(value: Any) -> Any:
    return value._read() if isinstance(value, SavedTensor) else value


@contextmanager
def read_once() -> Iterator[Unfilled]:
    """Load policies in this block without a second copy of their weights."""

    def load_file(filename: str | Path, device: str | int = "cpu", **_: Any) -> dict[str, Tensor]:
        # `device` is where the policy is; its parameters copy from the CPU one by one.
        file = WeightsFile(Path(filename))
        return {n: SavedTensor(file.outline(n), partial(file.tensor, n)) for n in file.names}

    # safetensors has no setting for reading tensors when they are needed, and LeRobot none for
    # another function that reads.
    with replaced(safetensors.torch, "load_file", load_file), Unfilled() as unfilled:
        yield unfilled


def check_filled(policy: nn.Module, unfilled: Unfilled, file: Path) -> None:
    """Refuse a policy with large parameters that are in no file.

    Tensors of `state_dict` are compared with the file; others LeRobot would leave random.
    """
    saved = policy.state_dict()
    left = [
        name
        for name, parameter in policy.named_parameters()
        if name not in saved and unfilled.is_left(parameter)
    ]
    if left:
        raise CraftError(
            f"The weights of {file} are not all of the policy's.",
            why=f"{len(left)} parameters are neither saved nor loaded, such as {left[0]}: they "
            "would be random.",
            fix="save them with the policy's state_dict.",
        )
