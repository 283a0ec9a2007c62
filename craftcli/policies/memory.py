"""Trading time for memory: computing layers again in the backward pass."""

from typing import Any

from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from torch import nn

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import Wanted


def save_memory(policy: Any) -> None:
    """Switch on the policy's own gradient checkpointing."""
    enable = getattr(getattr(policy, "model", None), "gradient_checkpointing_enable", None)
    if enable is not None:
        enable()
    elif isinstance(policy.config, DiffusionConfig):
        # Its U-Net asks the configuration in every forward pass; others ask it only when built.
        policy.config.gradient_checkpointing = True
        unet = policy.diffusion.unet
        # Tells the engine to leave it in training mode for anchors too, or it would not recompute.
        getattr(unet, "_orig_mod", unet).gradient_checkpointing = True
    else:
        raise CraftError(
            "This policy has no gradient checkpointing.",
            why=f"LeRobot's {policy.config.type} does not implement it.",
            fix="leave --gradient-checkpointing out; --amp bf16 and a smaller --batch-size with "
            "--grad-accum save memory too.",
            exit_code=EXIT_USAGE,
        )


def is_recomputing(module: nn.Module) -> bool:
    """Whether a module, when it trains, runs its layers again in the backward pass."""
    names = ("gradient_checkpointing", "gradient_checkpointing_enabled")
    return any(getattr(module, name, False) is True for name in names)


def may_stop(policy: nn.Module, wanted: Wanted) -> bool:
    """Whether a forward pass may end at the last layer that is wanted."""
    return not (wanted.output or recomputes(policy))


def recomputes(policy: nn.Module) -> bool:
    """Whether some layers of a policy, as it is now, are run again in the backward pass.

    A forward pass must then not be stopped half-way: it would leave such a layer open, and what is
    computed next would count as part of it.
    """
    return any(module.training and is_recomputing(module) for module in policy.modules())
