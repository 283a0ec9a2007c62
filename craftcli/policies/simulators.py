"""LeRobot's own environments as simulations."""

import contextlib
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import lerobot
import numpy as np
import torch
from lerobot.envs import EnvConfig, make_env, make_env_config, make_env_pre_post_processors
from lerobot.envs.utils import close_envs, preprocess_observation
from lerobot.utils.constants import ACTION
from numpy.typing import NDArray

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.evaluation.simulation import Environment, Moment


class LeRobotSimulation:
    """One of LeRobot's environments, with the processors that belong to it and the policy."""

    def __init__(self, config: Any, suite: str, task_id: int, policy_config: Any) -> None:
        # LeRobot prints while it looks for packages; standard output belongs to the command.
        with contextlib.redirect_stdout(io.StringIO()):
            worlds = make_env(config, n_envs=1)
        self._world = worlds[suite].pop(task_id)
        close_envs(worlds)
        self._preprocess, self._postprocess = make_env_pre_post_processors(config, policy_config)

    def reset(self, seed: int) -> Moment:
        """Begin the episode of that seed."""
        seen, _ = self._world.reset(seed=[seed])
        return Moment(observation=self._observation(seen))

    def step(self, action: NDArray[Any]) -> Moment:
        """Act once."""
        processed = self._postprocess({ACTION: torch.from_numpy(action[None])})[ACTION]
        seen, _, terminated, truncated, info = self._world.step(processed.cpu().numpy())
        over = bool(terminated[0] or truncated[0])
        # The world begins the next episode by itself, and keeps the end of this one apart.
        told = info.get("final_info", info).get("is_success", [False])
        success = bool(np.asarray(told).reshape(-1)[0])
        return Moment(observation=self._observation(seen), success=success, over=over or success)

    def close(self) -> None:
        """Close the world."""
        self._world.close()

    def _observation(self, seen: Any) -> dict[str, Any]:
        observation = preprocess_observation(seen)
        observation["task"] = [self._task()]
        processed = self._preprocess(observation)
        return {
            key: value[0].cpu().numpy() if isinstance(value, torch.Tensor) else value[0]
            for key, value in processed.items()
            if key == "task" or isinstance(value, torch.Tensor)
        }

    def _task(self) -> str:
        for name in ("task_description", "task"):
            with contextlib.suppress(AttributeError, NotImplementedError):
                return str(self._world.call(name)[0])
        return ""


def lerobot_environments(kind: str, task: str | None, policy_config: Any) -> list[Environment]:
    """The tasks of one of LeRobot's environments, such as pusht or libero:libero_spatial."""
    known = sorted(EnvConfig.get_known_choices())
    if kind not in known:
        raise CraftError(
            f"There is no environment {kind!r}.",
            why=f"craft knows demo and metaworld, and LeRobot {', '.join(known)}.",
            fix="write one of these, with a task as in metaworld:reach-v3.",
            exit_code=EXIT_USAGE,
        )
    config = make_env_config(kind, **({"task": task} if task else {}))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            worlds = make_env(config, n_envs=1)
    except ImportError as error:
        raise CraftError(
            f"The environment {kind} is not installed.",
            why=f"{error}",
            fix=f"uv pip install 'lerobot[{kind}]'",
        ) from error
    except Exception as error:  # every simulator has its own ways to say that a task is unknown
        raise CraftError(
            f"The environment {kind} cannot be made.",
            why=f"{type(error).__name__}: {error}",
            fix="check the task's name, and that the simulator runs by itself.",
        ) from error
    found = [
        Environment(
            name=f"{kind}:{task or config.task}" + (f"/{task_id}" if len(tasks) > 1 else ""),
            make=partial(LeRobotSimulation, config, suite, task_id, policy_config),
            max_steps=int(world.call("_max_episode_steps")[0]),
        )
        for suite, tasks in worlds.items()
        for task_id, world in tasks.items()
    ]
    close_envs(worlds)
    return found


def metaworld_instructions() -> dict[str, str]:
    """What each Meta-World task is called in LeRobot's datasets."""
    # Read, because importing the module around it needs Meta-World and builds fifty experts.
    file = Path(lerobot.__file__).parent / "envs/metaworld_config.json"
    instructions: dict[str, str] = json.loads(file.read_text())["TASK_DESCRIPTIONS"]
    return instructions
