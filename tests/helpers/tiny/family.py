"""What the shared suite knows about a family, and plain hooks to check its adapter with."""

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiny.world import write_dataset

SEED = 7


def nothing_drawn(_policy: Any, _batch: dict[str, Any]) -> dict[str, Any]:
    """For a family whose forward pass draws nothing in evaluation mode."""
    return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A tiny policy, and an independent way to everything that its adapter returns."""

    name: str
    make: Callable[[Path], Path]
    """Write a checkpoint that `load_checkpoint` opens."""
    reference: Callable[[Any, dict[str, Any], str], Mapping[int, Tensor]]
    """Hidden states [B, S, D] of a stack from the policy's own forward pass, which draws what it
    draws after `torch.manual_seed(SEED)`."""
    reached: Mapping[str, tuple[str, ...]]
    """By stack: parameters (how their names start) that a gradient through its last layer meets."""
    untouched: Mapping[str, tuple[str, ...]]
    """By stack: parameters that lie behind its last layer, or beside it."""
    draw: Callable[[Any, dict[str, Any]], dict[str, Any]] = nothing_drawn
    """The batch entries that stand for what that forward pass draws."""
    write_data: Callable[[Path], object] = write_dataset
    """Write a dataset that the policy can be run on."""
    alone: tuple[str, ...] = ()
    """Stacks that run without the actions: their padding then attends to fewer tokens."""
    camera: str | None = None
    """A camera that the policy cannot run without; None if there is none."""


def hooked(policy: Any, names: list[str], run: Callable[[], object]) -> dict[int, Tensor]:
    """What the modules of these names return while `run` runs, in the order of the names."""
    seen: dict[int, Tensor] = {}

    def keep(_module: Any, _args: Any, output: Tensor, *, number: int) -> None:
        # A hook that returned it would replace what the module returns in a second call.
        seen.setdefault(number, output)

    with ExitStack() as hooks, torch.no_grad():
        for number, name in enumerate(names):
            module = policy.get_submodule(name)
            hook = functools.partial(keep, number=number)
            hooks.callback(module.register_forward_hook(hook).remove)
        run()
    return seen


def keyword_of(policy: Any, name: str, keyword: str, run: Callable[[], object]) -> Tensor:
    """What a module is given under a keyword while `run` runs."""
    seen: list[Tensor] = []
    handle = policy.get_submodule(name).register_forward_pre_hook(
        lambda _module, _args, keywords: seen.append(keywords[keyword]), with_kwargs=True
    )
    try:
        with torch.no_grad():
            run()
    finally:
        handle.remove()
    return seen[0]


def argument_of(policy: Any, name: str, position: int, run: Callable[[], object]) -> Tensor:
    """What a module is given at a position while `run` runs."""
    seen: list[Tensor] = []
    handle = policy.get_submodule(name).register_forward_pre_hook(
        lambda _module, args: seen.append(args[position])
    )
    with torch.no_grad():
        run()
    handle.remove()
    return seen[0]


def own_forward(policy: Any, batch: dict[str, Any]) -> Callable[[], object]:
    """The policy's own training forward, with random draws from SEED."""

    def run() -> object:
        torch.manual_seed(SEED)
        return policy(dict(batch))

    return run
