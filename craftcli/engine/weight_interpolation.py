"""Weights interpolated between a teacher and a student, which often keep both skills (WiSE-FT).

    θ = θ_teacher + α (θ_student - θ_teacher), with an α for each group of tensors

Wortsman et al., Robust fine-tuning of zero-shot models, CVPR 2022, arXiv 2109.01903.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from craftcli.errors import EXIT_USAGE, CraftError

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors with an α of their own."""

    pattern: str
    """Parts of a dotted name, as in vision_tower or layers.3, or a glob over the whole name."""
    alpha: float

    def __contains__(self, name: str) -> bool:
        if any(sign in self.pattern for sign in "*?["):
            return fnmatch.fnmatchcase(name, self.pattern)
        return f".{self.pattern}." in f".{name}."


def choose_alphas(
    weights: Mapping[str, Tensor], alpha: float, groups: Sequence[Group]
) -> dict[str, float]:
    """The α of every tensor: that of the last group it is in, else `alpha`.

    Tensors that share their memory get the same α.
    """
    _require_matches(weights, groups)
    tied: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in weights.items():
        tied.setdefault(_memory(tensor), []).append(name)
    chosen: dict[str, float] = {}
    for names in tied.values():
        deciding = [group for group in groups if any(name in group for name in names)]
        chosen |= dict.fromkeys(names, deciding[-1].alpha if deciding else alpha)
    return chosen


def interpolate(teacher: Tensor, student: Tensor, alpha: float) -> Tensor:
    """teacher + alpha (student - teacher), in at least float32; exact for alpha 0 and 1."""
    if alpha == 0 and teacher.is_floating_point():
        return teacher
    if alpha == 1 or not student.is_floating_point():
        return student
    dtype = torch.promote_types(student.dtype, torch.float32)
    return torch.lerp(teacher.to(dtype), student.to(dtype), alpha)


def interpolate_weights(
    teacher: Mapping[str, Tensor],
    student: Mapping[str, Tensor],
    alphas: Mapping[str, float],
    dtypes: Mapping[str, torch.dtype],
    on_tensor: Callable[[int], None],
) -> dict[str, Tensor]:
    """Interpolate all weights and convert them to `dtypes`; tied weights stay tied."""
    result: dict[str, Tensor] = {}
    done: dict[tuple[int, ...], Tensor] = {}
    for name, own in student.items():
        key = _memory(own)
        if key not in done:
            between = interpolate(teacher[name], own, alphas[name])
            done[key] = between.to(dtypes[name]).contiguous()
        result[name] = done[key]
        on_tensor(1)
    return result


def require_same_architecture(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor]) -> None:
    """Refuse weights of different architectures, and name the first tensors that differ."""
    shapes = [{name: tuple(t.shape) for name, t in side.items()} for side in (teacher, student)]
    names = dict.fromkeys([*student, *teacher])
    differing = [name for name in names if shapes[0].get(name) != shapes[1].get(name)]
    if not differing:
        return
    examples = "; ".join(
        f"{name} is {_shape(shapes[0].get(name))} in the teacher and "
        f"{_shape(shapes[1].get(name))} in the student"
        for name in differing[:_SHOWN]
    )
    raise CraftError(
        "Student and teacher cannot be interpolated: their architectures differ.",
        why=f"{len(differing)} of their tensors differ: {examples}.",
        fix="give --teacher the policy that the student was trained from.",
    )


def _memory(tensor: Tensor) -> tuple[int, ...]:
    """A key that tied tensors share; empty tensors have no memory, so each gets its own."""
    return (tensor.data_ptr() if tensor.numel() else id(tensor), *tensor.shape)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a number"


def _require_matches(weights: Mapping[str, Tensor], groups: Sequence[Group]) -> None:
    for group in groups:
        if any(name in group for name in weights):
            continue
        parts = dict.fromkeys(part for name in weights for part in name.split(".")[:-1])
        raise CraftError(
            f"No tensor is in the group {group.pattern}.",
            why="a group is a part of a dotted name, or a glob over the whole name.",
            fix=f"use one of {', '.join(part for part in parts if not part.isdecimal())}; "
            f"a whole name is {next(iter(weights))}.",
            exit_code=EXIT_USAGE,
        )
