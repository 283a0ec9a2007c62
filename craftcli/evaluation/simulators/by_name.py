"""Opens environments by name: demo, metaworld:TASK, or one of LeRobot's."""

import dataclasses
from functools import partial
from typing import Any

from craftcli.errors import CraftError
from craftcli.evaluation.simulators.base import Environment
from craftcli.evaluation.simulators.demo import demo_environments
from craftcli.evaluation.simulators.lerobot import lerobot_environments
from craftcli.evaluation.simulators.metaworld import (
    DEFAULT_STEPS,
    HAND_SIZE,
    STATE_SIZE,
    VECTORS,
    MetaWorld,
)
from craftcli.evaluation.simulators.names import check_environment_name, metaworld_instructions
from craftcli.policies.families.registry import register_policy_plugins


def open_environments(
    name: str, policy_config: Any, *, max_steps: int | None = None
) -> list[Environment]:
    """The tasks of a name, with the observations that a policy of this configuration reads.

    `demo` is all instructions of the demo and `demo:blue` one of them, `metaworld:reach-v3` a task
    of Meta-World; `pusht`, `aloha:TASK`, `libero:SUITE` and so on are LeRobot's, or of an installed
    package lerobot_env_*. LeRobot's own Meta-World, `lerobot:metaworld:TASK`, always renders.
    `max_steps` replaces the task's own limit.

    Raises:
        CraftError: the name is unknown, the simulator is not installed, or it does not fit.
    """
    register_policy_plugins()
    check_environment_name(name)
    kind, _, task = name.partition(":")
    match kind:
        case "demo":
            found = demo_environments((task,)) if task else demo_environments()
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


def _metaworld(task: str, policy_config: Any) -> Environment:
    shapes = {key: tuple(feature.shape) for key, feature in policy_config.input_features.items()}
    vectors = {key: shapes[key][0] for key in VECTORS if key in shapes}
    others = [size for size in vectors.values() if size not in (STATE_SIZE, HAND_SIZE)]
    if others:
        raise CraftError(
            f"metaworld:{task} lacks inputs of the policy.",
            why=f"a state of {STATE_SIZE} numbers, or the first {HAND_SIZE} of them, is offered; "
            f"the policy reads {others[0]}.",
            fix="evaluate a policy that was trained on Meta-World.",
        )
    cameras = {key: shapes[key][-2:] for key in policy_config.image_features}
    return Environment(
        name=f"metaworld:{task}",
        make=partial(
            MetaWorld,
            task,
            instruction=metaworld_instructions()[task],
            vectors=vectors,
            cameras=cameras,
        ),
        max_steps=DEFAULT_STEPS,
    )
