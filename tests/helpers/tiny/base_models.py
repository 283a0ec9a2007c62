"""LeRobot's base models as they are published, tiny: their features, processors and statistics.

What is known, and from where:

- lerobot/pi05_base: three cameras `base_0_rgb`, `left_wrist_0_rgb`, `right_wrist_0_rgb` of
  (3, 224, 224), a state and an action of 32 (config.json of its copy TensorAuto/pi05_base, and of
  policies trained with --policy.path=lerobot/pi05_base, in which only the action's size changed).
  Its preprocessor's normaliser has `"features": {}`, QUANTILES for state and action and no
  `state_file`: no statistics at all (lerobot/pi05_base, refs/pr/5, policy_preprocessor.json; the
  postprocessor in its fork qualiaadmin/pi05_base). An older upload is reported with mean 0 and
  deviation 1 (issue 14): `inert` below.
- lerobot/pi0_base: the same conversion from openpi, with MEAN_STD (processors as in
  lerobot/pi05_libero_base and AdilZtn/pi0_pipeline: `"features": {}`, no state file).
- lerobot/pi0fast-base: policy_preprocessor.json on its main branch: `"features": {}`, MEAN_STD, no
  state file, prompts of 200 tokens, actions of up to 256; its card says "Fine tune on your task".
- lerobot/smolvla_base: `observation.images.camera1` to `camera3`, a state and an action of 6,
  padded to 32 (LeRobot's documentation of smolvla and of --rename_map). Its statistics are named
  `so100.buffer.action`, `so100-blue.buffer.action` and `so100-red.buffer.action`
  (4paradigm/phanthymotus#242, read from the checkpoint): LeRobot's migrate_policy_normalization.py
  turns `normalize_targets.so100.buffer_action.mean` into such a name, and finds no statistics of
  the state, because it looks for `normalalize_inputs.`.

Sizes that only cost time are small here: widths, depths, pixels, chunks and prompts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors
from lerobot.policies.pi0_fast.processor_pi0_fast import make_pi0_fast_pre_post_processors
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
from lerobot.processor import NormalizerProcessorStep, UnnormalizerProcessorStep

from tiny import pi0, pi0_fast, pi05, smolvla
from tiny.paligemma import with_words

PADDED = 32
"""Numbers to which these policies pad states and actions."""
OPENPI_CAMERAS = tuple(
    f"observation.images.{name}_0_rgb" for name in ("base", "left_wrist", "right_wrist")
)
SMOLVLA_CAMERAS = tuple(f"observation.images.camera{number}" for number in (1, 2, 3))
PROMPT_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A base model: how to write it, and the names of its cameras."""

    name: str
    make: Callable[[Path], Path]
    cameras: tuple[str, ...]


def features(cameras: tuple[str, ...], px: int, size: int) -> dict[str, Any]:
    """The features of a configuration: cameras, and a state and an action of one size."""
    inputs = {
        camera: PolicyFeature(type=FeatureType.VISUAL, shape=(3, px, px)) for camera in cameras
    }
    inputs["observation.state"] = PolicyFeature(type=FeatureType.STATE, shape=(size,))
    action = PolicyFeature(type=FeatureType.ACTION, shape=(size,))
    return {"input_features": inputs, "output_features": {"action": action}}


def _pi_settings() -> dict[str, Any]:
    return {
        **features(OPENPI_CAMERAS, 224, PADDED),
        "max_state_dim": PADDED,
        "max_action_dim": PADDED,
        "empty_cameras": 0,
        "tokenizer_max_length": PROMPT_TOKENS,
    }


def _without_features(processors: tuple[Any, Any]) -> tuple[Any, Any]:
    """Processors whose normalisers know neither features nor statistics."""
    for processor in processors:
        for step in processor.steps:
            if isinstance(step, NormalizerProcessorStep | UnnormalizerProcessorStep):
                step.features, step.stats = {}, {}
                step.to()
    return processors


def _save(folder: Path, policy: Any, processors: tuple[Any, Any]) -> Path:
    policy.save_pretrained(folder)
    for processor in processors:
        processor.save_pretrained(folder)
    return folder


def make_pi0_base(folder: Path) -> Path:
    policy = pi0.policy(**_pi_settings())
    made = with_words(folder, policy.config, make_pi0_pre_post_processors, stats=None)
    return _save(folder, policy, _without_features(made))


def make_pi05_base(folder: Path) -> Path:
    policy = pi05.policy(**_pi_settings())
    made = with_words(folder, policy.config, make_pi05_pre_post_processors, stats=None)
    return _save(folder, policy, _without_features(made))


def make_inert_pi05_base(folder: Path) -> Path:
    """With MEAN_STD and statistics that change nothing."""
    modes = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    policy = pi05.policy(**_pi_settings())
    policy.config.normalization_mapping = {
        kind: type(policy.config.normalization_mapping["STATE"])(mode)
        for kind, mode in modes.items()
    }
    neutral = {"mean": torch.zeros(PADDED), "std": torch.ones(PADDED)}
    stats = {"observation.state": neutral, "action": neutral}
    made = with_words(folder, policy.config, make_pi05_pre_post_processors, stats=stats)
    return _save(folder, policy, made)


def make_pi0_fast_base(folder: Path) -> Path:
    settings: dict[str, Any] = {**_pi_settings(), "max_action_tokens": 90, "max_decoding_steps": 8}
    policy = pi0_fast.policy(pi0_fast.write_tokenizers(folder), **settings)
    made = make_pi0_fast_pre_post_processors(policy.config, dataset_stats=None)
    return _save(folder, policy, _without_features(made))


def make_smolvla_base(folder: Path) -> Path:
    vlm = smolvla.write_vlm(folder.parent / f"{folder.name}-vlm")
    policy = smolvla.policy(
        vlm,
        **{
            **features(SMOLVLA_CAMERAS, 256, 6),
            "max_state_dim": PADDED,
            "max_action_dim": PADDED,
            "empty_cameras": 0,
            "tokenizer_max_length": PROMPT_TOKENS,
        },
    )
    # In degrees, of the size that the checkpoint is reported to have.
    numbers = {"mean": torch.linspace(-27, 120, 6), "std": torch.linspace(19, 59, 6)}
    robots = ("so100", "so100-blue", "so100-red")
    stats = {f"{robot}.buffer.action": numbers for robot in robots}
    return _save(folder, policy, make_pre_post_processors(policy.config, dataset_stats=stats))


BASE_MODELS = (
    BaseModel(name="smolvla_base", make=make_smolvla_base, cameras=SMOLVLA_CAMERAS),
    BaseModel(name="pi0_base", make=make_pi0_base, cameras=OPENPI_CAMERAS),
    BaseModel(name="pi05_base", make=make_pi05_base, cameras=OPENPI_CAMERAS),
    BaseModel(name="pi05_base_inert", make=make_inert_pi05_base, cameras=OPENPI_CAMERAS),
    BaseModel(name="pi0fast_base", make=make_pi0_fast_base, cameras=OPENPI_CAMERAS),
)
