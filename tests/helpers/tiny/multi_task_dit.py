"""Multi-task DiT with two cameras and language, by diffusion and by flow matching."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.multi_task_dit.configuration_multi_task_dit import MultiTaskDiTConfig
from lerobot.policies.multi_task_dit.modeling_multi_task_dit import MultiTaskDiTPolicy
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
)

from craftcli.policies.base import NOISE, TIME
from tiny.family import SEED, Family, argument_of, hooked, keyword_of, own_forward
from tiny.world import CAMERAS, PX, TASKS, input_features, output_features, save

HORIZON, STEPS = 8, 6
WORDS = ["<pad>", "<eos>", "<unk>", *sorted({word for task in TASKS for word in task.split()})]


def write_clip(root: Path, px: int = PX) -> tuple[Path, Path]:
    """Both halves of a tiny CLIP, as the policy opens them by name; the text one has its words."""
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "projection_dim": 16,
    }
    torch.manual_seed(0)
    vision, text = root / "clip-vision", root / "clip-text"
    CLIPVisionModel(CLIPVisionConfig(**shape, image_size=px, patch_size=16)).save_pretrained(vision)
    CLIPTextModel(
        CLIPTextConfig(
            **shape,
            vocab_size=len(WORDS),
            max_position_embeddings=8,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=1,
        )
    ).save_pretrained(text)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # CLIP reads a text off at its end marker.
    tokenizer.post_processor = processors.TemplateProcessing("$A <eos>", None, [("<eos>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(text)
    return vision, text


def policy(root: Path, *, cameras: int = 2, px: int = PX, **settings: Any) -> MultiTaskDiTPolicy:
    vision, text = write_clip(root, px)
    torch.manual_seed(0)
    made = MultiTaskDiTPolicy(
        MultiTaskDiTConfig(
            device="cpu",
            push_to_hub=False,
            input_features=input_features(cameras=cameras, px=px),
            output_features=output_features(),
            vision_encoder_name=str(vision),
            text_encoder_name=str(text),
            tokenizer_max_length=8,
            image_crop_shape=None,
            horizon=HORIZON,
            n_action_steps=4,
            hidden_dim=16,
            num_layers=2,
            num_heads=2,
            timestep_embed_dim=16,
            num_train_timesteps=STEPS,
            num_integration_steps=STEPS,
            **settings,
        )
    )
    # Fresh blocks are the identity; a trained policy's are not.
    for block in made.noise_predictor.transformer_blocks:
        nn.init.normal_(block.adaLN_modulation[-1].weight, std=0.1)
    return made


def make_with(objective: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        beside = folder.parent / f"{folder.name}-encoders"
        return save(folder, policy(beside, objective=objective))

    return make


make = make_with("diffusion")


def _reference(policy: Any, batch: dict[str, Any], stack: str) -> dict[int, Tensor]:
    run = own_forward(policy, batch)
    if stack == "conditioning":
        return {0: keyword_of(policy, "noise_predictor", "conditioning_vec", run).unsqueeze(1)}
    return hooked(policy, [f"noise_predictor.transformer_blocks.{i}" for i in range(2)], run)


def _draw(policy: Any, batch: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(SEED)
    noise = torch.randn_like(batch["action"])
    time = argument_of(policy, "noise_predictor", 1, own_forward(policy, batch))
    return {NOISE: noise, TIME: time}


_SEEN = ("observation_encoder.vision_encoder", "observation_encoder.text_encoder.projection")


def _family(name: str, objective: str) -> Family:
    return Family(
        name=name,
        make=make_with(objective),
        reference=_reference,
        draw=_draw,
        camera=CAMERAS[1],
        reached={
            "conditioning": _SEEN,
            "transformer": (*_SEEN, "noise_predictor.transformer_blocks"),
        },
        untouched={
            "conditioning": ("noise_predictor",),
            "transformer": ("noise_predictor.output_proj",),
        },
    )


DIFFUSED = _family("multi_task_dit", "diffusion")
FLOWED = _family("multi_task_dit-flow", "flow_matching")
