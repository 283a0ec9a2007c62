"""A groot (GR00T N1.7) of some 150 000 parameters: a small Qwen3-VL and a small action head.

LeRobot's policy opens a base model by its folder, which is written here too.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.groot.configuration_groot import GrootConfig
from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config
from lerobot.policies.groot.modeling_groot import GrootPolicy
from lerobot.policies.groot.processor_groot import make_groot_pre_post_processors
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLVideoProcessor

from craftcli.policies.base import NOISE, TIME
from tiny.family import SEED, Family, hooked
from tiny.words import text_tokenizer
from tiny.world import input_features, output_features, stats

CHUNK, PX, PATCH_PX, MERGED = 4, 64, 16, 2
DEPTH, VLM_DEPTH = 3, 2
MARKERS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
TEMPLATE = (
    "{% for m in messages %}{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endfor %}"
)


def make(folder: Path) -> Path:
    base = write_base(folder.parent / f"{folder.name}-base")
    made = policy(base)
    made.save_pretrained(folder)
    for processor in processors(made, base):
        processor.save_pretrained(folder)
    return folder


def policy(base: Path, *, cameras: int = 2, **settings: Any) -> GrootPolicy:
    return GrootPolicy(
        GrootConfig(
            **{
                "device": "cpu",
                "push_to_hub": False,
                "input_features": input_features(cameras=cameras),
                "output_features": output_features(),
                "base_model_path": str(base),
                "chunk_size": CHUNK,
                "n_action_steps": CHUNK,
                "max_state_dim": 6,
                "max_action_dim": 5,
                "use_bf16": False,
                # By default LeRobot trains the action head alone.
                "tune_llm": True,
                "tune_visual": True,
                **settings,
            }
        )
    )


def processors(policy: GrootPolicy, base: Path) -> tuple[Any, Any]:
    """LeRobot's own, with the small Qwen3-VL in place of the one that it hard-codes."""
    before, after = make_groot_pre_post_processors(policy.config, dataset_stats=stats())
    for step in before.steps:
        if hasattr(step, "model_name"):
            step.model_name = str(_backbone(base))
    return before, after


def write_base(folder: Path) -> Path:
    """A base model as NVIDIA publishes them: weights, configuration, and sizes of images."""
    _write_backbone(_backbone(folder))
    torch.manual_seed(0)
    model = GR00TN17(
        GR00TN17Config(
            model_name=str(_backbone(folder)),
            model_dtype="float32",
            dtype="float32",
            select_layer=VLM_DEPTH,
            backbone_embedding_dim=32,
            hidden_size=24,
            input_embedding_dim=32,
            max_state_dim=6,
            max_action_dim=5,
            action_horizon=CHUNK,
            max_seq_len=16,
            max_num_embodiments=12,
            diffusion_model_cfg={
                "positional_embeddings": None,
                "num_layers": DEPTH,
                "num_attention_heads": 4,
                "attention_head_dim": 8,
                "norm_type": "ada_norm",
                "dropout": 0.2,
                "final_dropout": True,
                "output_dim": 24,
                "interleave_self_attention": True,
            },
            vl_self_attention_cfg={
                "positional_embeddings": None,
                "num_layers": 1,
                "num_attention_heads": 4,
                "attention_head_dim": 8,
                "dropout": 0.2,
                "final_dropout": True,
            },
        ),
        load_backbone_weights=False,
    )
    model.save_pretrained(folder)
    sizes = {"image_target_size": [PX, PX], "image_crop_size": [PX - 8, PX - 8]}
    (folder / "processor_config.json").write_text(json.dumps({"processor_kwargs": sizes}))
    return folder


def _backbone(base: Path) -> Path:
    # LeRobot knows the kind of a backbone by its name.
    return base / "Qwen/Qwen3-VL-tiny"


def _write_backbone(folder: Path) -> None:
    tokenizer = text_tokenizer(**MARKERS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes = {"patch_size": PATCH_PX, "merge_size": MERGED, "temporal_patch_size": 2}
    edges = {"shortest_edge": PX, "longest_edge": PX * PX * 4}
    Qwen2VLImageProcessor(**sizes, size=edges).save_pretrained(folder)
    Qwen3VLVideoProcessor(**sizes, size=edges).save_pretrained(folder)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(word) for name, word in MARKERS.items()}
    Qwen3VLConfig(
        **ids,
        tie_word_embeddings=True,
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": VLM_DEPTH + 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "deepstack_visual_indexes": [0],
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "num_position_embeddings": 16,
            "out_hidden_size": 32,
            "patch_size": PATCH_PX,
            "spatial_merge_size": MERGED,
            "temporal_patch_size": 2,
        },
    ).save_pretrained(folder)


def single_rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Every row as the preprocessor gives it alone, without the padding of the others."""
    rows = []
    images = {key: batch[key].unflatten(0, (len(batch["input_ids"]), -1)) for key in _IMAGES}
    for row, mask in enumerate(batch["attention_mask"]):
        length = int(mask.sum())
        alone = {key: batch[key][row : row + 1] for key in _VECTORS}
        alone |= {key: batch[key][row : row + 1, -length:] for key in _WORDS}
        rows.append({**alone, **{key: images[key][row] for key in _IMAGES}})
    return rows


_IMAGES = ("pixel_values", "image_grid_thw")
_WORDS = ("input_ids", "attention_mask")
_VECTORS = ("state", "embodiment_id", "action", "action_mask")


def _reference(policy: Any, batch: dict[str, Any], stack: str) -> dict[int, Tensor]:
    model = "_groot_model.backbone.model.model.language_model.layers"
    blocks = "_groot_model.action_head.model.transformer_blocks"
    names = {
        "vlm": [f"{model}.{i}" for i in range(VLM_DEPTH)],
        "expert": [f"{blocks}.{i}" for i in range(DEPTH)],
    }
    longest = batch["input_ids"].shape[1] if stack == "vlm" else 1 + CHUNK
    seen = []
    for row, alone in enumerate(single_rows(batch)):
        states = hooked(policy, names[stack], _forward(policy, alone, SEED + row))
        seen.append({layer: _padded(state, longest) for layer, state in states.items()})
    return {layer: torch.cat([states[layer] for states in seen]) for layer in seen[0]}


def _forward(policy: Any, batch: dict[str, Any], seed: int) -> Callable[[], object]:
    def run() -> object:
        torch.manual_seed(seed)
        return policy(batch)

    return run


def _padded(states: Any, length: int) -> Tensor:
    states = states if isinstance(states, Tensor) else states[0]
    return functional.pad(states, (0, 0, length - states.shape[1], 0))


def _draw(policy: Any, batch: dict[str, Any]) -> dict[str, Any]:
    noise, time = [], []
    for row in range(len(batch["action"])):
        torch.manual_seed(SEED + row)
        noise.append(torch.randn(batch["action"][:1].shape))
        head = policy._groot_model.action_head
        time.append(head.sample_time(1, torch.device("cpu"), torch.float32))
    return {NOISE: torch.cat(noise), TIME: torch.cat(time)}


_QWEN, _HEAD = "_groot_model.backbone.model.model", "_groot_model.action_head"
_SEEN = (f"{_QWEN}.visual", f"{_QWEN}.language_model.layers")
GROOT = Family(
    name="groot",
    make=make,
    reference=_reference,
    draw=_draw,
    # Rows of one length run together; the reference runs each alone.
    alone=("vlm", "expert"),
    reached={
        "vlm": _SEEN,
        "expert": (
            *_SEEN,
            f"{_HEAD}.vlln",
            f"{_HEAD}.vl_self_attention",
            f"{_HEAD}.state_encoder",
            f"{_HEAD}.action_encoder",
            f"{_HEAD}.position_embedding",
            f"{_HEAD}.model.timestep_encoder",
            f"{_HEAD}.model.transformer_blocks",
        ),
    },
    untouched={
        "vlm": (f"{_QWEN}.language_model.norm", _HEAD),
        "expert": (
            f"{_QWEN}.language_model.norm",
            f"{_HEAD}.model.proj_out",
            f"{_HEAD}.action_decoder",
        ),
    },
)
