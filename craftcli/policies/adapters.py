"""Low-rank adapters: a few small matrices beside frozen weights, trained in their stead."""

import contextlib
import dataclasses
import io
import re
from pathlib import Path

import torch
from torch import nn

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.lora import LoraSpec
from craftcli.policies.base import Policy
from craftcli.policies.loading import Checkpoint

_ADAPTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# torch's attention takes the weight of this one and never calls it: an adapter would do nothing.
_NEVER_CALLED = nn.modules.linear.NonDynamicallyQuantizableLinear
_EXAMPLES = 12


def add_adapters(student: Checkpoint, spec: LoraSpec, *, seed: int) -> Checkpoint:
    """Freeze the policy and give it adapters, which change nothing until they are trained."""
    if student.peft is not None:
        raise CraftError(
            f"{student.source} has adapters already.",
            why="adapters cannot be trained on top of adapters.",
            fix="leave --lora out to go on training them, or merge them first: craft merge "
            f"{student.source} --alpha 1 -o FOLDER.",
            exit_code=EXIT_USAGE,
        )
    possible = [name for name, module in student.policy.named_modules() if _adaptable(module)]
    targets = _find_targets(student, spec.targets, possible)
    overrides = {"r": spec.r, "lora_alpha": spec.alpha, "target_modules": targets or None}
    # One of a pair of matrices starts at random: the same in all processes.
    torch.manual_seed(seed)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            peft = student.policy.wrap_with_peft(peft_cli_overrides=overrides)
    except ValueError as error:
        raise _not_possible(student, str(error).splitlines()[0], possible) from error
    _name_base(peft, student)
    return dataclasses.replace(student, peft=peft)


def merge_adapters(checkpoint: Checkpoint) -> Checkpoint:
    """Put what the adapters add into the weights, all of which are float32 from then on."""
    if checkpoint.peft is None:
        return checkpoint
    checkpoint.policy.float()
    policy = checkpoint.peft.merge_and_unload()
    policy.config.use_peft = False
    return dataclasses.replace(checkpoint, policy=policy, peft=None)


def weight_dtypes(policy: nn.Module) -> dict[str, torch.dtype]:
    """The precision of every tensor, under the name it has without adapters."""
    return {
        re.sub(r"\.(base_layer|original_module)\.", ".", name): tensor.dtype
        for name, tensor in policy.state_dict().items()
    }


def _name_base(peft: Policy, student: Checkpoint) -> None:
    """Write down where the policy came from, as someone else would open it."""
    local = Path(student.source).expanduser().exists()
    for config in peft.peft_config.values():
        config.base_model_name_or_path = str(student.folder) if local else student.source
        config.revision = student.revision


def _find_targets(student: Checkpoint, targets: tuple[str, ...], possible: list[str]) -> list[str]:
    """The targets as PEFT takes them: ends of names, or whole names where those say too much."""
    found: list[str] = []
    for target in targets:
        pattern = re.compile(rf"(.*\.)?{re.escape(target).replace(re.escape('*'), '.*')}")
        named = [name for name, _ in student.policy.named_modules() if pattern.fullmatch(name)]
        fitting = [name for name in possible if pattern.fullmatch(name)]
        if not fitting:
            why = f"no linear layer or convolution of it has a name that ends in {target!r}."
            raise _not_possible(student, why, possible)
        found += fitting if "*" in target or len(fitting) < len(named) else [target]
    return found


def _adaptable(module: nn.Module) -> bool:
    # PEFT cannot merge what it adds to a convolution in groups.
    whole = getattr(module, "groups", 1) == 1
    return isinstance(module, _ADAPTABLE) and not isinstance(module, _NEVER_CALLED) and whole


def _not_possible(student: Checkpoint, why: str, names: list[str]) -> CraftError:
    # A number alone, as in a list of layers, would name something in every list.
    ends = dict.fromkeys(re.search(r"[^.]+(\.\d+)*$", name)[0] for name in names)  # type: ignore[index]
    return CraftError(
        f"The {student.policy_type} policy cannot be given these adapters.",
        why=why,
        fix=f"name modules in --lora targets=..., such as {', '.join([*ends][:_EXAMPLES])}, or "
        f"{names[-1]}.",
        exit_code=EXIT_USAGE,
    )
