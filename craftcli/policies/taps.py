"""Reading hidden states out of a running forward pass, and stopping it early."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from craftcli.policies.base import FeatureRequest, LayerStack, TapPoint


class _StopForward(BaseException):  # not an error: the forward pass is complete
    """Ends a forward pass once every requested layer was read.

    A `BaseException`, so that no `except Exception` in a policy catches it. `seen` says which tap
    raised it: the tap of another stack must not catch it either.
    """

    def __init__(self, seen: dict[int, Tensor]) -> None:
        super().__init__()
        self.seen = seen


@contextmanager
def tap(
    stack: LayerStack, layers: tuple[int, ...], *, stop: bool = True
) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of `layers` from the forward pass inside the `with` block.

    With `stop`, the pass ends after the last of these layers, and the rest of the block is skipped.
    The tensors are those of the forward pass, so a gradient through one is the whole gradient
    through that layer's output. A layer that runs again in the backward pass (gradient
    checkpointing) is not recorded a second time. What torch.compile has compiled runs uncompiled.
    """
    seen: dict[int, Tensor] = {}
    last = max(layers) if stop and layers else None
    handles = [
        _hook(stack.points[layer], _recorder(seen, layer, stop=layer == last)) for layer in layers
    ]
    try:
        with _uncompiled():
            yield seen
    except _StopForward as stopped:
        if stopped.seen is not seen:
            raise
    finally:
        for handle in handles:
            handle.remove()


def may_stop(policy: nn.Module, request: FeatureRequest) -> bool:
    """Whether a forward pass may end at the last requested layer.

    Not if the output is requested, and not if the policy recomputes layers in the backward pass
    (gradient checkpointing): an interrupted layer would stay open, and whatever is computed next
    would count as part of it.
    """
    recomputes = any(module.training and is_recomputing(module) for module in policy.modules())
    return not (request.output or recomputes)


def is_recomputing(module: nn.Module) -> bool:
    """Whether a module recomputes its layers in the backward pass when it is in training mode."""
    names = ("gradient_checkpointing", "gradient_checkpointing_enabled")
    return any(getattr(module, name, False) is True for name in names)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Let compiled functions run as they were written.

    A compiled forward pass does not call hooks that were added after its compilation, and it cannot
    be stopped.
    """
    if "torch._dynamo" not in sys.modules:  # slow to import, and without it nothing is compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _hook(point: TapPoint, record: Callable[[Any], None]) -> Any:
    if point.before:
        return point.module.register_forward_pre_hook(lambda _module, args: record(args))
    return point.module.register_forward_hook(lambda _module, _args, output: record(output))


def _recorder(seen: dict[int, Tensor], layer: int, *, stop: bool) -> Callable[[Any], None]:
    def record(found: Any) -> None:
        seen.setdefault(layer, found if isinstance(found, Tensor) else found[0])
        if stop:
            raise _StopForward(seen)

    return record
