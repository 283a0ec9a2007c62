"""LeRobot's own pi05, pi0 and pi0_fast classes, with a small PaliGemma and a small expert."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0_fast import modeling_pi0_fast
from lerobot.policies.pi05 import modeling_pi05

from tiny.configuration_tiny_pi import (
    SmallPI0FastConfig,
    TinyPI0Config,
    TinyPI05Config,
)


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


class SmallPI0FastPolicy(modeling_pi0_fast.PI0FastPolicy):
    """pi0_fast, unchanged but for its sizes."""

    config_class = SmallPI0FastConfig
    name = "craft_small_pi0_fast"

    def __init__(self, config: SmallPI0FastConfig, **kwargs: Any) -> None:
        with _small(modeling_pi0_fast, config):
            super().__init__(config, **kwargs)


@contextmanager
def _small(module: Any, sizes: Any) -> Iterator[None]:
    """While the constructor runs, the sizes that LeRobot hard-codes are those given."""
    vlm_class = module.PaliGemmaForConditionalGenerationWithPiGemma
    # pi0_fast has none.
    expert_class: Any = getattr(module, "PiGemmaForCausalLM", None)

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

    small = {
        "get_gemma_config": variant,
        "PaliGemmaForConditionalGenerationWithPiGemma": vlm,
        **({"PiGemmaForCausalLM": expert} if expert_class else {}),
    }
    with ExitStack() as patches:
        for name, replacement in small.items():
            patches.enter_context(patch.object(module, name, replacement))
        yield


def _shrink(config: Any, sizes: Any) -> None:
    config.image_token_index = config.image_token_id = sizes.vocab_size
    config.projection_dim = sizes.width
    config.text_config.vocab_size = sizes.vocab_size
    vision = config.vision_config
    vision.projection_dim = sizes.width
    vision.hidden_size = 32
    vision.intermediate_size = sizes.mlp_dim
    vision.num_hidden_layers = sizes.vision_depth
    vision.num_attention_heads = 4
    vision.patch_size = sizes.patch_px
    # LeRobot's pi0_fast forgets to pass on the size of its images.
    vision.image_size = sizes.image_resolution[0]
