"""LoRA: train a few small matrices beside frozen weights, instead of the weights themselves."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from craftcli.config.parsing import LoraSpec
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import Policy
from craftcli.policies.lerobot.checkpoint import Checkpoint

_SUPPORTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# torch's attention reads the weight of this module and never calls it: LoRA would have no effect.
_NEVER_CALLED = nn.modules.linear.NonDynamicallyQuantizableLinear
_EXAMPLES = 12


def add_lora(student: Checkpoint, spec: LoraSpec, *, seed: int) -> Checkpoint:
    """Freeze the policy and add LoRA weights, which have no effect until they are trained."""
    if student.peft is not None:
        raise CraftError(
            f"{student.source} has LoRA weights already.",
            why="LoRA weights cannot be trained on top of others.",
            fix="leave --lora out to continue their training, or add them to the policy first: "
            f"craft merge {student.source} --alpha 1 -o FOLDER.",
            exit_code=EXIT_USAGE,
        )
    possible = [name for name, module in student.policy.named_modules() if _supports_lora(module)]
    targets = _find_targets(student, spec.targets, possible)
    overrides = {"r": spec.r, "lora_alpha": spec.alpha, "target_modules": targets or None}
    # One matrix of each pair starts at random: all processes must draw the same.
    torch.manual_seed(seed)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            peft = student.policy.wrap_with_peft(peft_cli_overrides=overrides)
    except ValueError as error:
        raise _not_possible(student, str(error).splitlines()[0], possible) from error
    _record_base(peft, student)
    return dataclasses.replace(student, peft=peft)


def fold_lora(checkpoint: Checkpoint) -> Checkpoint:
    """Add the LoRA weights to the policy's own weights, which become float32."""
    if checkpoint.peft is None:
        return checkpoint
    checkpoint.policy.float()
    policy = checkpoint.peft.merge_and_unload()
    policy.config.use_peft = False
    return dataclasses.replace(checkpoint, policy=policy, peft=None)


@contextmanager
def lora_switched_off(checkpoint: Checkpoint) -> Iterator[None]:
    """Temporarily make a policy with new LoRA weights the policy that it was without them."""
    trained = [(p, p.requires_grad) for p in checkpoint.policy.parameters()]
    try:
        with checkpoint.peft.disable_adapter():
            yield
    finally:
        # PEFT makes all LoRA weights trainable again, those that were frozen as well.
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)


def weight_dtypes(policy: nn.Module) -> dict[str, torch.dtype]:
    """The dtype of each tensor, by its name in the policy without LoRA."""
    return {
        re.sub(r"\.(base_layer|original_module)\.", ".", name): tensor.dtype
        for name, tensor in policy.state_dict().items()
    }


def _record_base(peft: Policy, student: Checkpoint) -> None:
    """Record where the policy came from, as others would open it."""
    local = Path(student.source).expanduser().exists()
    for config in peft.peft_config.values():
        config.base_model_name_or_path = str(student.folder) if local else student.source
        config.revision = student.revision


def _find_targets(student: Checkpoint, targets: tuple[str, ...], possible: list[str]) -> list[str]:
    """The targets in PEFT's form: the end of a name, or whole names if the end matches too much."""
    found: list[str] = []
    for target in targets:
        pattern = re.compile(rf"(.*\.)?{re.escape(target).replace(re.escape('*'), '.*')}")
        named = [name for name, _ in student.policy.named_modules() if pattern.fullmatch(name)]
        fitting = [name for name in possible if pattern.fullmatch(name)]
        if not fitting:
            why = f"it has no linear layer or convolution with a name that ends in {target!r}."
            raise _not_possible(student, why, possible)
        found += fitting if "*" in target or len(fitting) < len(named) else [target]
    return found


def _supports_lora(module: nn.Module) -> bool:
    # PEFT cannot fold LoRA weights into a convolution with groups.
    whole = getattr(module, "groups", 1) == 1
    return isinstance(module, _SUPPORTED) and not isinstance(module, _NEVER_CALLED) and whole


def _not_possible(student: Checkpoint, why: str, names: list[str]) -> CraftError:
    # With its number: a number alone, as in a list of layers, would match in every list.
    ends = dict.fromkeys(re.search(r"[^.]+(\.\d+)*$", name)[0] for name in names)  # type: ignore[index]
    return CraftError(
        f"Cannot add these LoRA weights to the {student.policy_type} policy.",
        why=why,
        fix=f"name modules in --lora targets=..., such as {', '.join([*ends][:_EXAMPLES])}, or "
        f"{names[-1]}.",
        exit_code=EXIT_USAGE,
    )
