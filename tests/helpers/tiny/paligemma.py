"""What the tiny pi05 and pi0 policies share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lerobot.processor import TokenizerProcessorStep
from torch import Tensor

from tiny.family import Family, own_forward
from tiny.residuals import draw, layer_outputs
from tiny.words import text_tokenizer
from tiny.world import input_features, output_features, stats


def pi_settings(*, cameras: int = 2, px: int = 32, **settings: Any) -> dict[str, Any]:
    """The configuration of a policy with that many cameras, shown to it at that size."""
    return {
        "device": "cpu",
        "push_to_hub": False,
        "input_features": input_features(cameras=cameras),
        "output_features": output_features(),
        "image_resolution": (px, px),
        "empty_cameras": 1,
        "chunk_size": 4,
        "n_action_steps": 4,
        "max_state_dim": 6,
        "max_action_dim": 5,
        "num_inference_steps": 3,
        "tokenizer_max_length": 24,
        **settings,
    }


def save_with_words(folder: Path, policy: Any, processors: Callable[..., Any]) -> Path:
    """Save as LeRobot does, with words of our own: it hard-codes the name of a tokenizer."""
    made = with_words(folder, policy.config, processors, stats=_with_quantiles())
    policy.save_pretrained(folder)
    for processor in made:
        processor.save_pretrained(folder)
    return folder


def with_words(
    folder: Path, config: Any, processors: Callable[..., Any], *, stats: Any
) -> tuple[Any, Any]:
    """The processors that LeRobot makes, with a tokenizer of our own, written to the folder."""
    words = folder / "text_tokenizer"
    text_tokenizer().save_pretrained(words)
    open_tokenizer = TokenizerProcessorStep.__post_init__

    def open_words(step: Any) -> None:
        step.tokenizer_name = str(words)
        open_tokenizer(step)

    with patch.object(TokenizerProcessorStep, "__post_init__", open_words):
        before, after = processors(config, dataset_stats=stats)
    return before, after


def pi_family(name: str, make: Callable[[Path], Path], *, time_layers: str) -> Family:
    """What the suite is to find in a pi policy."""
    model = "model.paligemma_with_expert"
    vlm, expert = f"{model}.paligemma.model", f"{model}.gemma_expert"
    seen = (f"{vlm}.vision_tower", f"{vlm}.multi_modal_projector", f"{vlm}.language_model.layers")
    return Family(
        name=name,
        make=make,
        reference=_reference,
        draw=draw,
        alone=("vlm",),
        reached={
            "vlm": (f"{vlm}.language_model.embed_tokens", *seen),
            "expert": (*seen, f"{expert}.model.layers", "model.action_in_proj", time_layers),
        },
        untouched={
            "vlm": (f"{vlm}.language_model.norm", expert, "model.action_", time_layers),
            "expert": (f"{expert}.model.norm", "model.action_out_proj"),
        },
    )


def _reference(policy: Any, batch: dict[str, Any], stack: str) -> dict[int, Tensor]:
    model = policy.model.paligemma_with_expert
    layers = {
        "vlm": model.paligemma.model.language_model.layers,
        "expert": model.gemma_expert.model.layers,
    }
    return layer_outputs(layers[stack], own_forward(policy, batch))


def _with_quantiles() -> dict[str, dict[str, torch.Tensor]]:
    """pi05 normalises by quantiles."""
    return {
        name: {**numbers, "q01": numbers["min"], "q99": numbers["max"]}
        for name, numbers in stats().items()
    }
