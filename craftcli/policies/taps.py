"""Reading hidden states out of a running forward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from craftcli.policies.base import LayerStack, TapPoint


class _EnoughLayers(BaseException):  # no error: the forward pass is done
    """Raised inside a forward pass once every layer asked for has been seen.

    No policy that catches exceptions may catch it, nor may the tap of other layers.
    """

    def __init__(self, seen: dict[int, Tensor]) -> None:
        super().__init__()
        self.seen = seen


@contextmanager
def tap(
    stack: LayerStack, layers: tuple[int, ...], *, stop: bool = True
) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of `layers` from the forward pass run inside; `stop` it after the last.

    The tensors are those of the forward pass, so a gradient through one is the whole gradient
    through that layer's output. Layers that run again in a backward pass (gradient checkpointing)
    are not recorded a second time.
    """
    seen: dict[int, Tensor] = {}
    last = max(layers) if stop and layers else None
    handles = [
        _hook(stack.points[layer], _recorder(seen, layer, stop=layer == last)) for layer in layers
    ]
    try:
        yield seen
    except _EnoughLayers as enough:
        if enough.seen is not seen:
            raise
    finally:
        for handle in handles:
            handle.remove()


def _hook(point: TapPoint, record: Callable[[Any], None]) -> Any:
    if point.before:
        return point.module.register_forward_pre_hook(lambda _module, args: record(args))
    return point.module.register_forward_hook(lambda _module, _args, output: record(output))


def _recorder(seen: dict[int, Tensor], layer: int, *, stop: bool) -> Callable[[Any], None]:
    def record(found: Any) -> None:
        seen.setdefault(layer, found if isinstance(found, Tensor) else found[0])
        if stop:
            raise _EnoughLayers(seen)

    return record
