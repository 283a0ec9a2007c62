"""LeRobot's own pi05 and pi0 classes, built with a small PaliGemma and a small expert."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi05 import modeling_pi05

from tiny.configuration_tiny_pi import Sizes, TinyPI0Config, TinyPI05Config


class TinyPI05Policy(modeling_pi05.PI05Policy):
    """pi05, unchanged but for its sizes."""

    config_class = TinyPI05Config
    name = "craft_tiny_pi05"

    def __init__(self, config: TinyPI05Config, **kwargs: Any) -> None:
        with _small(modeling_pi05, config):
            super().__init__(config, **kwargs)


class TinyPI0Policy(modeling_pi0.PI0Policy):
    """pi0, unchanged but for its sizes."""

    config_class = TinyPI0Config
    name = "craft_tiny_pi0"

    def __init__(self, config: TinyPI0Config, **kwargs: Any) -> None:
        with _small(modeling_pi0, config):
            super().__init__(config, **kwargs)


@contextmanager
def _small(module: Any, sizes: Sizes) -> Iterator[None]:
    """While the constructor runs, the sizes that LeRobot hard-codes are those given."""
    vlm_class = module.PaliGemmaForConditionalGenerationWithPiGemma
    expert_class = module.PiGemmaForCausalLM

    def variant(name: str) -> Any:
        return module.GemmaConfig(
            width=sizes.width if name == "gemma_2b" else sizes.expert_width,
            depth=sizes.depth,
            mlp_dim=sizes.mlp_dim,
            num_heads=8,
            num_kv_heads=1,
            head_dim=sizes.head_dim,
        )

    def vlm(config: Any) -> Any:
        _shrink(config, sizes)
        return vlm_class(config=config)

    def expert(config: Any) -> Any:
        config.vocab_size = sizes.vocab_size
        return expert_class(config=config)

    with (
        patch.object(module, "get_gemma_config", variant),
        patch.object(module, "PaliGemmaForConditionalGenerationWithPiGemma", vlm),
        patch.object(module, "PiGemmaForCausalLM", expert),
    ):
        yield


def _shrink(config: Any, sizes: Sizes) -> None:
    config._vocab_size = config.image_token_index = config.image_token_id = sizes.vocab_size
    config.projection_dim = sizes.width
    config.text_config.vocab_size = sizes.vocab_size
    vision = config.vision_config
    vision.projection_dim = sizes.width
    vision.hidden_size = 32
    vision.intermediate_size = sizes.mlp_dim
    vision.num_hidden_layers = sizes.vision_depth
    vision.num_attention_heads = 4
    vision.patch_size = sizes.patch_px
