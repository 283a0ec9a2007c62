"""Reading hidden states out of a running forward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from craftcli.policies.base import LayerStack


class _EnoughLayers(Exception):  # noqa: N818  # no error: the forward pass is done
    """Raised inside a forward pass once every layer asked for has been seen."""


@contextmanager
def tap(
    stack: LayerStack, layers: tuple[int, ...], *, stop: bool = True
) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of `layers` from the forward pass run inside; `stop` it after the last.

    The output of layer i is read as the input of what follows it: the next layer's input norm, or
    the final norm. Joint-attention policies (pi0, smolvla) never call their layers as modules, but
    all of them call these norms. The norm's input is the residual stream itself, so a gradient
    through the tapped tensor is the whole gradient through that layer's output.
    """
    seen: dict[int, Tensor] = {}
    last = max(layers) if stop else None
    handles = [
        _following_norm(stack, layer).register_forward_pre_hook(
            _recorder(seen, layer, stop=layer == last)
        )
        for layer in layers
    ]
    try:
        yield seen
    except _EnoughLayers:
        pass
    finally:
        for handle in handles:
            handle.remove()


def _following_norm(stack: LayerStack, layer: int) -> nn.Module:
    if layer + 1 < len(stack.layers):
        norm: nn.Module = stack.layers[layer + 1].input_layernorm  # type: ignore[assignment]
        return norm
    return stack.norm


def _recorder(
    seen: dict[int, Tensor], layer: int, *, stop: bool
) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def record(_module: nn.Module, args: tuple[Any, ...]) -> None:
        seen[layer] = args[0]
        if stop:
            raise _EnoughLayers

    return record
