"""The modules of a policy that FSDP2 can gather one at a time.

FSDP2 gathers the parameters of a module when the module is called. Joint-attention policies never
call the layers of their language models, but they call what the layers are made of.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn


def attention_units(layers: Iterable[Any]) -> list[nn.Module]:
    """The modules of language-model layers that hold the weights and that all families call."""
    units: list[nn.Module] = []
    for layer in layers:
        attention = layer.self_attn
        units += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, layer.mlp]
        # Not the norms themselves: a forward pass that is stopped early ends before one of them.
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        units += [norm.dense for norm in norms if getattr(norm, "dense", None) is not None]
    return units


def vision_units(tower: nn.Module) -> list[nn.Module]:
    """The layers of a vision transformer of Hugging Face, which calls them as modules."""
    lists = [m for name, m in tower.named_modules() if name.endswith("encoder.layers")]
    return [layer for found in lists for layer in found.children()]


def paligemma_units(paligemma: Any) -> list[nn.Module]:
    """The units of PaliGemma; embedding and head are two only where they share no weight."""
    language, tower = paligemma.model.language_model, paligemma.model.vision_tower
    ends = [language.embed_tokens, paligemma.lm_head]
    return [*attention_units(language.layers), *vision_units(tower), *ends]
