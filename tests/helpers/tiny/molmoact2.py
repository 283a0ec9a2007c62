"""A molmoact2 of some 100 000 parameters: a small Molmo, and an action expert beside it.

LeRobot's policy opens a base model by its folder, which is written here too.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config
from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy
from lerobot.policies.molmoact2.molmoact2_hf_model.action_tokenizer import UniversalActionProcessor
from lerobot.policies.molmoact2.molmoact2_hf_model.configuration_molmoact2 import (
    MolmoAct2Config as ModelConfig,
)
from lerobot.policies.molmoact2.molmoact2_hf_model.modeling_molmoact2 import (
    MolmoAct2ForConditionalGeneration,
)
from lerobot.policies.molmoact2.processor_molmoact2 import make_molmoact2_pre_post_processors
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2Tokenizer

from craftcli.policies.base import NOISE, TIME
from tiny.family import SEED, Family, hooked
from tiny.world import ACTIONS, TASKS, input_features, output_features, stats

CHUNK, DEPTH, FLOW_TIMES = 4, 3, 2
PX, PATCH_PX = 32, 8
STATE_WORDS, ACTION_WORDS = 16, 160
PAD, IMAGE_END, PATCH = "<|endoftext|>", "<im_end>", "<im_patch>"
START, END = "<action_start>", "<action_end>"
MARKERS = (
    *(PAD, "<|im_start|>", "<|im_end|>", "<|image|>", "<|video|>"),
    *("<setup_start>", "<setup_end>", "<control_start>", "<control_end>"),
    *("<state_start>", "<state_end>", *(f"<state_{i}>" for i in range(STATE_WORDS))),
    *("<action_output>", START, END, *(f"<action_{i}>" for i in range(ACTION_WORDS))),
)
IMAGE_MARKERS = (
    *(PATCH, "<im_low>", "<im_start>", "<low_res_im_start>"),
    *("<frame_start>", IMAGE_END, "<frame_end>", "<im_col>"),
)
PROMPT = (
    "Image 1 Image 2 user\nThe task is to {}. The setup is . The current state of the robot is . "
    "The expected control mode is . Given these, what action should the robot take to complete the "
    "task?\nassistant\n"
)


def make(folder: Path) -> Path:
    base = write_base(folder.parent / f"{folder.name}-base")
    made = policy(base)
    made.save_pretrained(folder)
    for processor in processors(made):
        processor.save_pretrained(folder)
    return folder


def policy(base: Path, *, cameras: int = 2, **settings: Any) -> MolmoAct2Policy:
    return MolmoAct2Policy(
        MolmoAct2Config(
            **{
                "device": "cpu",
                "push_to_hub": False,
                "input_features": input_features(cameras=cameras),
                "output_features": output_features(),
                "checkpoint_path": str(base),
                "discrete_action_tokenizer": str(base / "actions"),
                "inference_action_mode": "continuous",
                "chunk_size": CHUNK,
                "n_action_steps": CHUNK,
                "num_state_tokens": STATE_WORDS,
                "num_flow_timesteps": FLOW_TIMES,
                "num_inference_steps": 3,
                "model_dtype": "float32",
                # By default LeRobot does not train them.
                "freeze_embedding": False,
                **settings,
            }
        )
    )


def processors(policy: MolmoAct2Policy) -> tuple[Any, Any]:
    """LeRobot's own; molmoact2 normalises by quantiles."""
    known = {
        name: {**numbers, "q01": numbers["min"], "q99": numbers["max"]}
        for name, numbers in stats().items()
    }
    before, after = make_molmoact2_pre_post_processors(policy.config, dataset_stats=known)
    return before, after


def write_base(folder: Path, *, crop_mode: str = "resize") -> Path:
    """A base model as Ai2 publishes them: weights, tokenizers, and sizes of images."""
    folder.mkdir(parents=True)
    words = _write_words(folder)
    _write_action_words(folder / "actions")
    sizes = {"size": {"height": PX, "width": PX}, "patch_size": PATCH_PX, "pooling_size": [2, 2]}
    crops = {"crop_mode": crop_mode, "max_crops": 2, "overlap_margins": [1, 1]}
    config = {"image_processor": {**sizes, **crops}, "video_processor": sizes}
    (folder / "processor_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = MolmoAct2ForConditionalGeneration(_model_config(words))
    # At first time and actions change nothing; in a trained policy they do.
    for name, parameter in model.named_parameters():
        if "modulation.linear" in name or "final_layer.linear" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def _model_config(words: Qwen2Tokenizer) -> ModelConfig:
    def number(word: str) -> int:
        found: int = words.convert_tokens_to_ids(word)
        return found

    attention = {"num_attention_heads": 4, "head_dim": 8}
    vision = {**attention, "hidden_size": 32, "num_key_value_heads": 4, "intermediate_size": 48}
    return ModelConfig(
        vit_config={
            **vision,
            "num_hidden_layers": 2,
            "image_default_input_size": (PX, PX),
            "image_patch_size": PATCH_PX,
            "image_num_pos": (PX // PATCH_PX) ** 2,
        },
        adapter_config={**vision, "vit_layers": (-1, -2), "text_hidden_size": 32},
        text_config={
            **attention,
            "hidden_size": 32,
            "num_key_value_heads": 2,
            "vocab_size": len(words) - len(IMAGE_MARKERS),
            "additional_vocab_size": len(IMAGE_MARKERS),
            "num_hidden_layers": DEPTH,
            "intermediate_size": 48,
            "max_position_embeddings": 512,
            "use_qk_norm": True,
            "qk_norm_type": "qwen3",
        },
        action_expert_config={
            "hidden_size": 32,
            "num_layers": DEPTH,
            "num_heads": 4,
            "ffn_multiple_of": 16,
            "timestep_embed_dim": 16,
            "dropout": 0.2,
        },
        max_action_horizon=CHUNK,
        image_start_token_id=number("<im_start>"),
        low_res_image_start_token_id=number("<low_res_im_start>"),
        image_end_token_id=number(IMAGE_END),
        image_low_res_id=number("<im_low>"),
        image_patch_id=number(PATCH),
        image_col_id=number("<im_col>"),
        frame_start_token_id=number("<frame_start>"),
        frame_end_token_id=number("<frame_end>"),
        action_output_token_id=number("<action_output>"),
        action_start_token_id=number(START),
        action_end_token_id=number(END),
        action_token_start_id=number("<action_0>"),
        num_action_tokens=ACTION_WORDS,
        eos_token_id=words.eos_token_id,
    )


def _write_words(folder: Path) -> Qwen2Tokenizer:
    """The words of the prompts; the markers of images come last, as in the real vocabulary."""
    learned = ByteLevelBPETokenizer()
    texts = [PROMPT.format(task) for task in TASKS]
    learned.train_from_iterator(texts * 2, vocab_size=400, show_progress=False)
    learned.save_model(str(folder))
    merges = (folder / "merges.txt").read_text().splitlines()[1:]
    words = Qwen2Tokenizer(
        vocab=learned.get_vocab(),
        merges=[tuple(line.split(" ")) for line in merges],
        # With padding behind a prompt, LeRobot's processor would take it for part of the prompt.
        padding_side="left",
    )
    words.add_tokens([*MARKERS, *IMAGE_MARKERS], special_tokens=True)
    words.save_pretrained(folder)
    return words


def _write_action_words(folder: Path) -> None:
    chance = np.random.default_rng(0)
    chunks = [chance.uniform(-1, 1, (CHUNK, ACTIONS)) for _ in range(300)]
    edges = [np.full((CHUNK, ACTIONS), edge) for edge in (-1.0, 1.0)]
    made = UniversalActionProcessor.fit([*chunks, *edges], vocab_size=ACTION_WORDS)
    made.tokenizer.save_pretrained(folder)
    numbers = {"scale": made.scale, "vocab_size": made.vocab_size, "min_token": made.min_token}
    (folder / "processor_config.json").write_text(json.dumps(numbers))


def single_rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Every row as the preprocessor gives it alone, without the padding of the others."""
    rows = []
    images = {key: batch[key].unflatten(0, (len(batch["input_ids"]), -1)) for key in _IMAGES}
    for row, mask in enumerate(batch["attention_mask"].bool()):
        alone = {key: batch[key][row : row + 1] for key in _VECTORS}
        alone |= {key: batch[key][row : row + 1, mask] for key in _WORDS}
        rows.append({**alone, **{key: images[key][row] for key in _IMAGES}})
    return rows


_IMAGES = ("pixel_values", "image_token_pooling", "image_grids", "image_num_crops")
_WORDS = ("input_ids", "attention_mask", "token_type_ids", "labels")
_VECTORS = ("action", "action_horizon_is_pad", "action_dim_is_pad")


def _reference(policy: Any, batch: dict[str, Any], stack: str) -> dict[int, Tensor]:
    blocks = {"vlm": f"{_MODEL}.transformer.blocks", "expert": f"{_EXPERT}.blocks"}
    names = [f"{blocks[stack]}.{layer}" for layer in range(DEPTH)]
    seen: dict[int, list[Tensor]] = {layer: [] for layer in range(DEPTH)}
    for row, alone in enumerate(single_rows(batch)):
        for layer, states in hooked(policy, names, _forward(policy, alone, SEED + row)).items():
            # The expert has several times and noises in turn; see `_draw`.
            seen[layer].append(states[:1] if stack == "expert" else _of_prompt(alone, states[0]))
    longest = max(states.shape[1] for states in seen[0])
    return {
        layer: torch.cat([_padded(row, longest) for row in rows]) for layer, rows in seen.items()
    }


def _forward(policy: Any, batch: dict[str, Any], seed: int) -> Callable[[], object]:
    def run() -> object:
        torch.manual_seed(seed)
        return policy(batch)

    return run


def _of_prompt(batch: dict[str, Any], states: Tensor) -> Tensor:
    """The states before the first token of the actions, which is the first label."""
    return states[:, : int((batch["labels"][0] != -100).int().argmax())]


def _padded(states: Tensor, length: int) -> Tensor:
    return functional.pad(states, (0, 0, length - states.shape[1], 0))


def _draw(policy: Any, batch: dict[str, Any]) -> dict[str, Any]:
    noise, time = [], []
    for row, alone in enumerate(single_rows(batch)):
        torch.manual_seed(SEED + row)
        actions, times, _, velocity = policy._prepare_flow_matching_tensors(
            actions=alone["action"], action_dim_is_pad=alone["action_dim_is_pad"]
        )
        noise.append(actions - velocity[:, 0])
        time.append(times[:, 0])
    return {NOISE: torch.cat(noise), TIME: torch.cat(time)}


_MODEL = "model.model"
_EXPERT = f"{_MODEL}.action_expert"
_SEEN = (
    f"{_MODEL}.transformer.wte",
    f"{_MODEL}.vision_backbone.image_vit",
    f"{_MODEL}.vision_backbone.image_pooling_2d",
    f"{_MODEL}.vision_backbone.image_projector",
    f"{_MODEL}.transformer.blocks",
)
MOLMOACT2 = Family(
    name="molmoact2",
    make=make,
    reference=_reference,
    draw=_draw,
    # Both run over prompts alone, together; the reference runs each row with its actions.
    alone=("vlm", "expert"),
    reached={
        "vlm": _SEEN,
        "expert": (
            *_SEEN,
            f"{_EXPERT}.time_embed",
            f"{_EXPERT}.action_embed",
            f"{_EXPERT}.context_k_proj",
            f"{_EXPERT}.context_v_proj",
            f"{_EXPERT}.blocks",
        ),
    },
    untouched={
        "vlm": (f"{_MODEL}.transformer.ln_f", "model.lm_head", _EXPERT),
        "expert": (f"{_MODEL}.transformer.ln_f", "model.lm_head", f"{_EXPERT}.final_layer"),
    },
)
