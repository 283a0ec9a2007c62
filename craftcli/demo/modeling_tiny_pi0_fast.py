"""The demo's policy: LeRobot's own pi0_fast class, built with a small PaliGemma."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lerobot.policies.pi0_fast import modeling_pi0_fast
from lerobot.policies.pi0_fast.modeling_pi0_fast import PI0FastPolicy
from transformers import PaliGemmaConfig

from craftcli.demo.configuration_tiny_pi0_fast import TinyPI0FastConfig
from craftcli.demo.defaults import DEMO_POLICY_TYPE
from craftcli.patching import replaced


class TinyPI0FastPolicy(PI0FastPolicy):  # type: ignore[misc]  # lerobot ships no types
    """LeRobot's pi0_fast; only the sizes differ."""

    config_class = TinyPI0FastConfig
    name = DEMO_POLICY_TYPE

    def __init__(self, config: TinyPI0FastConfig, **kwargs: Any) -> None:
        with _small_paligemma(config):
            super().__init__(config, **kwargs)


@contextmanager
def _small_paligemma(config: TinyPI0FastConfig) -> Iterator[None]:
    """Let LeRobot build PaliGemma with the sizes of `config` inside the block.

    LeRobot hard-codes the vocabulary and the vision tower: no setting changes them.
    """
    name = "PaliGemmaForConditionalGenerationWithPiGemma"
    paligemma = getattr(modeling_pi0_fast, name)
    sizes = config

    def build(config: PaliGemmaConfig) -> Any:
        _shrink(config, sizes)
        return paligemma(config=config)

    with replaced(modeling_pi0_fast, name, build):
        yield


def _shrink(hf: PaliGemmaConfig, config: TinyPI0FastConfig) -> None:
    hf.image_token_index = hf.image_token_id = config.vocab_size
    hf.projection_dim = config.width
    text, vision = hf.text_config, hf.vision_config
    text.vocab_size = config.vocab_size
    text.hidden_size = config.width
    text.intermediate_size = config.mlp_dim
    text.num_hidden_layers = config.depth
    text.num_attention_heads = config.num_heads
    text.num_key_value_heads = 1
    text.head_dim = config.head_dim
    vision.projection_dim = config.width
    vision.hidden_size = config.vision_width
    vision.intermediate_size = config.vision_mlp_dim
    vision.num_hidden_layers = config.vision_depth
    vision.num_attention_heads = config.num_heads
    vision.patch_size = config.patch_px
    vision.image_size = config.image_resolution[0]
