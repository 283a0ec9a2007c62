"""Environments by name: demo, metaworld:TASK, or one of LeRobot's."""

import dataclasses
import importlib.util
from functools import partial
from typing import Any

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.evaluation.blocks import ALL_COLOURS, block_environments
from craftcli.evaluation.metaworld import (
    DEFAULT_STEPS,
    HAND_SIZE,
    STATE_SIZE,
    VECTORS,
    MetaWorld,
)
from craftcli.evaluation.simulation import Environment
from craftcli.policies.simulators import lerobot_environments, metaworld_instructions


def open_environments(
    name: str, policy_config: Any, *, max_steps: int | None = None
) -> list[Environment]:
    """The tasks that a name stands for, as a policy of this configuration sees them.

    `demo` stands for all instructions of the demo and `demo:blue` for one, `metaworld:reach-v3` for
    a task of Meta-World, and `pusht`, `aloha:TASK`, `libero:SUITE` and so on for LeRobot's;
    `lerobot:metaworld:TASK` is LeRobot's own Meta-World, which always renders.
    """
    kind, _, task = name.partition(":")
    match kind:
        case "demo":
            found = _demo(task)
        case "metaworld":
            found = [_metaworld(task, policy_config)]
        case "lerobot":
            own, _, own_task = task.partition(":")
            found = lerobot_environments(own, own_task or None, policy_config)
        case _:
            found = lerobot_environments(kind, task or None, policy_config)
    if max_steps is None:
        return found
    return [dataclasses.replace(environment, max_steps=max_steps) for environment in found]


def _demo(colour: str) -> list[Environment]:
    if not colour:
        return block_environments()
    if colour not in ALL_COLOURS:
        raise _unknown(f"demo:{colour}", "the demo", ALL_COLOURS)
    return block_environments((colour,))


def _metaworld(task: str, policy_config: Any) -> Environment:
    if importlib.util.find_spec("metaworld") is None:
        raise CraftError(
            "Meta-World is not installed.",
            why="craft brings it as an extra.",
            fix="uv pip install 'craftcli[metaworld]'",
        )
    instructions = metaworld_instructions()
    if task not in instructions:
        raise _unknown(f"metaworld:{task}", "Meta-World", tuple(instructions))
    shapes = {key: tuple(feature.shape) for key, feature in policy_config.input_features.items()}
    vectors = {key: shapes[key][0] for key in VECTORS if key in shapes}
    others = [size for size in vectors.values() if size not in (STATE_SIZE, HAND_SIZE)]
    if others:
        raise CraftError(
            f"metaworld:{task} does not show what the policy reads.",
            why=f"its state has {STATE_SIZE} numbers, or the first {HAND_SIZE} of them; the policy "
            f"reads {others[0]}.",
            fix="evaluate a policy that was trained on Meta-World.",
        )
    cameras = {key: shapes[key][-2:] for key in policy_config.image_features}
    return Environment(
        name=f"metaworld:{task}",
        make=partial(
            MetaWorld,
            task,
            instruction=instructions[task],
            vectors=vectors,
            cameras=cameras,
        ),
        max_steps=DEFAULT_STEPS,
    )


def _unknown(name: str, world: str, tasks: tuple[str, ...]) -> CraftError:
    return CraftError(
        f"There is no environment {name}.",
        why=f"{world} has {', '.join(tasks)}.",
        fix="write one of these after the colon.",
        exit_code=EXIT_USAGE,
    )
