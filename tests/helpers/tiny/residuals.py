"""The outputs of layers that joint-attention policies never call as modules, computed again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from craftcli.policies.base import NOISE, TIME
from tiny.family import SEED


def layer_outputs(layers: Any, run: Callable[[], object]) -> dict[int, Tensor]:
    """What each layer passes on: what enters its second norm, plus what its MLP makes of that.

    A norm that is modulated by time also returns a gate, by which the MLP's part is multiplied.
    """
    residual: dict[int, Tensor] = {}
    gate: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    handles = []
    for number, layer in enumerate(layers):

        def norm(_module: Any, args: Any, output: Any, number: int = number) -> None:
            residual[number] = args[0].clone()
            if isinstance(output, tuple) and output[1] is not None:
                gate[number] = output[1]

        def mlp(_module: Any, _args: Any, output: Tensor, number: int = number) -> None:
            # Some policies go on to add to this tensor in place.
            added = output.clone()
            added = added * gate[number] if number in gate else added
            outputs.setdefault(number, residual[number] + added)

        handles.append(layer.post_attention_layernorm.register_forward_hook(norm))
        handles.append(layer.mlp.register_forward_hook(mlp))
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return outputs


def draw(policy: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The noise and times of flow matching, in the order in which the policies draw them."""
    actions = policy.prepare_action(batch)
    torch.manual_seed(SEED)
    noise = policy.model.sample_noise(actions.shape, actions.device)
    return {NOISE: noise, TIME: policy.model.sample_time(len(actions), actions.device)}
