"""A small real smolvla that reads all wordings and reaches the red, green and yellow block."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from table import (
    ACTION,
    CAMERA,
    COLOURS,
    OLD,
    PX,
    STATE,
    STRIDE,
    WORDINGS,
    expert_chunk,
    render,
    sample_scene,
)
from tiny.smolvla import MARKERS
from tiny.words import text_tokenizer
from transformers import (
    LlamaConfig,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

WIDTH, HEADS = 96, 4
VISION_LAYERS, LAYERS = 2, 4
PATCH_PX, SCALE = 6, 2
CHUNK, CARRIED_OUT = 4, 2


def write_vlm(folder: Path) -> Path:
    """What smolvla takes of a SmolVLM on disk: its sizes and its processor."""
    sentences = tuple(w.format(colour) for w in WORDINGS for colour in COLOURS)
    tokenizer = text_tokenizer(tasks=sentences, **MARKERS)
    shared = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": HEADS}
    ends = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    language = LlamaConfig(
        **shared,
        **ends,
        vocab_size=len(tokenizer),
        num_hidden_layers=LAYERS,
        num_key_value_heads=HEADS,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=256,
    )
    SmolVLMConfig(
        text_config=language.to_dict(),
        vision_config={
            **shared,
            "num_hidden_layers": VISION_LAYERS,
            "image_size": PX,
            "patch_size": PATCH_PX,
        },
        scale_factor=SCALE,
        image_token_id=tokenizer.convert_tokens_to_ids(MARKERS["image_token"]),
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)
    SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(),
    ).save_pretrained(folder)
    return folder


def fresh_policy(vlm: Path) -> SmolVLAPolicy:
    """An untrained policy; everything in it is trained, the vision tower too."""
    torch.manual_seed(0)
    return SmolVLAPolicy(
        SmolVLAConfig(
            device="cpu",
            push_to_hub=False,
            input_features={
                CAMERA: PolicyFeature(type=FeatureType.VISUAL, shape=(3, PX, PX)),
                STATE: PolicyFeature(type=FeatureType.STATE, shape=(2,)),
            },
            output_features={ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(2,))},
            vlm_model_name=str(vlm),
            load_vlm_weights=False,
            train_expert_only=False,
            freeze_vision_encoder=False,
            num_vlm_layers=LAYERS,
            chunk_size=CHUNK,
            n_action_steps=CARRIED_OUT,
            max_state_dim=2,
            max_action_dim=2,
            num_steps=5,
            tokenizer_max_length=12,
            resize_imgs_with_padding=(PX, PX),
        )
    )


def statistics() -> dict[str, dict[str, torch.Tensor]]:
    """Places are spread over 0..1, and strides over a circle."""
    return {
        STATE: {"mean": torch.full((2,), 0.5), "std": torch.full((2,), 0.29)},
        ACTION: {"mean": torch.zeros(2), "std": torch.full((2,), STRIDE / 2**0.5)},
    }


def sample_batch(rng: np.random.Generator, size: int) -> dict[str, Any]:
    """New scenes at random points of the expert's path, in the form of a LeRobotDataset's batch."""
    images, states, actions, tasks = [], [], [], []
    for _ in range(size):
        scene, colour = sample_scene(rng), str(rng.choice(OLD))
        # Anywhere on the way, and a little beside it, as a policy that errs comes to be.
        share, beside = rng.uniform() ** 0.5, rng.normal(0, 0.03, 2)
        scene = type(scene)(
            blocks=scene.blocks,
            hand=np.clip(scene.hand + (1 - share) * scene.way(colour) + beside, 0, 1),
        )
        images.append(torch.from_numpy(render(scene)).permute(2, 0, 1).float() / 255)
        states.append(torch.from_numpy(scene.hand).float())
        actions.append(torch.from_numpy(expert_chunk(scene, colour, CHUNK)))
        tasks.append(str(rng.choice(WORDINGS)).format(colour))
    return {
        CAMERA: torch.stack(images),
        STATE: torch.stack(states),
        ACTION: torch.stack(actions),
        "task": tasks,
    }


def train_teacher(
    folder: Path, *, steps: int, lr: float, batch_size: int, on_step: Callable[[float], None]
) -> Path:
    """Teach a fresh policy with its own loss, on scenes that never repeat; a saved one is kept."""
    if folder.is_dir():
        return folder
    policy = fresh_policy(write_vlm(folder.with_name("vlm")))
    preprocess, postprocess = make_pre_post_processors(policy.config, dataset_stats=statistics())
    rng = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    policy.train()
    for _ in range(steps):
        loss, _ = policy(preprocess(sample_batch(rng, batch_size)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        on_step(loss.item())
    partial = folder.with_name(f"{folder.name}.partial")
    for part in (policy, preprocess, postprocess):
        part.save_pretrained(partial)
    partial.rename(folder)
    return folder
