"""Trading time for memory: computing layers again in the backward pass."""

from typing import Any

from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

from craftcli.errors import EXIT_USAGE, CraftError


def save_memory(policy: Any) -> None:
    """Switch on the policy's own gradient checkpointing."""
    enable = getattr(getattr(policy, "model", None), "gradient_checkpointing_enable", None)
    if enable is not None:
        enable()
    elif isinstance(policy.config, DiffusionConfig):
        # Its U-Net asks the configuration in every forward pass; others ask it only when built.
        policy.config.gradient_checkpointing = True
    else:
        raise CraftError(
            "This policy has no gradient checkpointing.",
            why=f"LeRobot's {policy.config.type} does not implement it.",
            fix="leave --gradient-checkpointing out; --amp bf16 and a smaller --batch-size with "
            "--grad-accum save memory too.",
            exit_code=EXIT_USAGE,
        )
