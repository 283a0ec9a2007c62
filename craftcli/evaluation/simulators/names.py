"""Names of environments, checked without importing a simulator, LeRobot or torch."""

import importlib.metadata
import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path

from craftcli.demo.world import NEW_COLOURS, OLD_COLOURS
from craftcli.errors import EXIT_USAGE, CraftError

ALL_COLOURS = (*OLD_COLOURS, *NEW_COLOURS)
"""The tasks of the demo."""
_PLUGINS = "lerobot_env_"
"""Begin of the names of packages that LeRobot imports because they register environments."""


def check_environment_name(name: str) -> None:
    """Refuse the name of an environment that cannot be opened.

    Tasks of LeRobot's environments are not checked: only their simulators know them. Neither are
    environments that an installed package may register with LeRobot once it is imported.

    Raises:
        CraftError: the environment or its task is unknown, or the simulator is not installed.
    """
    kind, _, task = name.partition(":")
    if kind == "demo":
        if task and task not in ALL_COLOURS:
            raise _unknown(name, "the demo", ALL_COLOURS)
    elif kind == "metaworld":
        if importlib.util.find_spec("metaworld") is None:
            raise CraftError(
                "Meta-World is not installed.",
                why="it is an optional extra of craft.",
                fix="uv pip install 'craftcli[metaworld]'",
            )
        if task not in metaworld_instructions():
            raise _unknown(name, "Meta-World", tuple(metaworld_instructions()))
    else:
        own = task.partition(":")[0] if kind == "lerobot" else kind
        if own not in lerobot_kinds() and not _plugins_to_import():
            raise unknown_environment(own)


def unknown_environment(kind: str) -> CraftError:
    """The error of an environment that neither craft nor LeRobot has."""
    return CraftError(
        f"Unknown environment {kind!r}.",
        why=f"craft has demo and metaworld, LeRobot has {', '.join(lerobot_kinds())}.",
        fix="use one of these, with a task as in metaworld:reach-v3; or install the package that "
        "has it, lerobot_env_*.",
        exit_code=EXIT_USAGE,
    )


def lerobot_kinds() -> tuple[str, ...]:
    """LeRobot's environments, and those that others have registered with it."""
    loaded = sys.modules.get("lerobot.envs.configs")
    return tuple(sorted(loaded.EnvConfig.get_known_choices())) if loaded else lerobots_own_kinds()


def _plugins_to_import() -> bool:
    """Whether a package is installed that LeRobot imports for its environments, and has not yet."""
    names = {distribution.name for distribution in importlib.metadata.distributions()}
    return any(name.startswith(_PLUGINS) and name not in sys.modules for name in names)


@cache
def lerobots_own_kinds() -> tuple[str, ...]:
    """The environments that LeRobot registers, read from its source: importing it takes long."""
    source = (_lerobot_folder() / "envs/configs.py").read_text("utf-8")
    found = re.findall(r'EnvConfig\.register_subclass\((?:name=)?"([^"]+)"', source)
    return tuple(sorted(found))


@cache
def metaworld_instructions() -> dict[str, str]:
    """The instruction of each Meta-World task, as LeRobot's datasets have it."""
    # Read from the file: importing LeRobot's module needs Meta-World and builds fifty experts.
    file = _lerobot_folder() / "envs/metaworld_config.json"
    instructions: dict[str, str] = json.loads(file.read_text("utf-8"))["TASK_DESCRIPTIONS"]
    return instructions


def _lerobot_folder() -> Path:
    # Finds a package of the top level without importing it.
    found = importlib.util.find_spec("lerobot")
    if found is None or found.origin is None:
        raise RuntimeError("LeRobot is not installed")
    return Path(found.origin).parent


def _unknown(name: str, world: str, tasks: tuple[str, ...]) -> CraftError:
    return CraftError(
        f"Unknown environment {name}.",
        why=f"{world} has {', '.join(tasks)}.",
        fix="use one of these after the colon.",
        exit_code=EXIT_USAGE,
    )
