"""Configuration of the demo's policy: LeRobot's pi0_fast with small sizes."""

from dataclasses import dataclass, field
from pathlib import Path

from lerobot.configs import NormalizationMode, PreTrainedConfig
from lerobot.policies.pi0_fast.configuration_pi0_fast import PI0FastConfig

from craftcli.demo.defaults import DEMO_POLICY_TYPE
from craftcli.demo.tokenizers import register_action_tokenizer, tokenizer_folders
from craftcli.demo.world import IMAGE_PX

TEACHER_FOLDER = Path(__file__).parent / "teacher"
"""The checkpoint of the demo's teacher, which comes with craft."""


@PreTrainedConfig.register_subclass(DEMO_POLICY_TYPE)
@dataclass
class TinyPI0FastConfig(PI0FastConfig):  # type: ignore[misc]  # lerobot ships no types
    """pi0_fast, small enough to train on a laptop. LeRobot hard-codes the first block of sizes."""

    width: int = 64
    depth: int = 4
    mlp_dim: int = 256
    num_heads: int = 4
    head_dim: int = 16
    vocab_size: int = 512
    vision_width: int = 64
    vision_depth: int = 2
    vision_mlp_dim: int = 128
    patch_px: int = 16

    image_resolution: tuple[int, int] = (IMAGE_PX, IMAGE_PX)
    chunk_size: int = 3
    n_action_steps: int = 3
    max_state_dim: int = 2
    max_action_dim: int = 2
    max_action_tokens: int = 11
    max_decoding_steps: int = 11
    tokenizer_max_length: int = 14
    # LeRobot leaves room for PaliGemma's segmentation tokens; this vocabulary has none.
    fast_skip_tokens: int = 0
    # A half-trained policy may decode anything: that should fail a rollout, not crash it.
    validate_action_token_prefix: bool = False
    # With MIN_MAX, grid positions become evenly spread state tokens.
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {
            "VISUAL": NormalizationMode.IDENTITY,
            "STATE": NormalizationMode.MIN_MAX,
            "ACTION": NormalizationMode.MIN_MAX,
        }
    )

    optimizer_lr: float = 1e-3
    scheduler_warmup_steps: int = 50
    scheduler_decay_steps: int = 1_000
    scheduler_decay_lr: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        # The tokenizers come with craft, so a checkpoint finds them on any machine.
        register_action_tokenizer()
        text, action = tokenizer_folders(TEACHER_FOLDER)
        self.text_tokenizer_name, self.action_tokenizer_name = str(text), str(action)
