"""The demo's policy: LeRobot's own pi0_fast class, built with a small PaliGemma."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from lerobot.policies.pi0_fast import modeling_pi0_fast
from lerobot.policies.pi0_fast.modeling_pi0_fast import PI0FastPolicy
from transformers import PaliGemmaConfig

from craftcli.demo.configuration_tiny_pi0_fast import TinyPI0FastConfig


class TinyPI0FastPolicy(PI0FastPolicy):  # type: ignore[misc]  # lerobot ships no types
    """pi0_fast, unchanged but for its sizes."""

    config_class = TinyPI0FastConfig
    name = "craft_tiny_pi0_fast"

    def __init__(self, config: TinyPI0FastConfig, **kwargs: Any) -> None:
        with _small_paligemma(config):
            super().__init__(config, **kwargs)


@contextmanager
def _small_paligemma(config: TinyPI0FastConfig) -> Iterator[None]:
    """While the constructor runs, PaliGemma is made with the sizes of `config`.

    LeRobot hard-codes the vocabulary and the vision tower, so there is no setting to pass.
    """
    real = modeling_pi0_fast.PaliGemmaForConditionalGenerationWithPiGemma

    def build(config_hf: PaliGemmaConfig) -> Any:
        _shrink(config_hf, config)
        return real(config=config_hf)

    with patch.object(
        modeling_pi0_fast,
        "PaliGemmaForConditionalGenerationWithPiGemma",
        lambda config: build(config),
    ):
        yield


def _shrink(hf: PaliGemmaConfig, config: TinyPI0FastConfig) -> None:
    hf._vocab_size = hf.image_token_index = hf.image_token_id = config.vocab_size
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
