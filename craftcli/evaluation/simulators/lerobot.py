"""LeRobot's own environments as simulations."""

import contextlib
import io
from functools import partial
from typing import Any

import numpy as np
import torch
from lerobot.envs import make_env, make_env_config, make_env_pre_post_processors
from lerobot.envs.configs import EnvConfig
from lerobot.envs.utils import close_envs, preprocess_observation
from lerobot.utils.constants import ACTION
from numpy.typing import NDArray

from craftcli.errors import CraftError
from craftcli.evaluation.simulators.base import Environment, StepResult
from craftcli.evaluation.simulators.names import unknown_environment

_SCENE = "init_state_id"
"""LIBERO's number of a recorded scene. It counts resets and ignores the seed, so that worlds side
by side would all show the same scene."""


class LeRobotSimulation:
    """One of LeRobot's environments, with its own pre- and postprocessors."""

    def __init__(self, config: Any, suite: str, task_id: int, policy_config: Any) -> None:
        # LeRobot prints while it looks for packages, and standard output is for the command's data.
        with contextlib.redirect_stdout(io.StringIO()):
            worlds = make_env(config, n_envs=1)
        self._world = worlds[suite].pop(task_id)
        close_envs(worlds)
        self._preprocess, self._postprocess = make_env_pre_post_processors(config, policy_config)
        self._counts_scenes = hasattr(self._world.envs[0].unwrapped, _SCENE)

    def reset(self, seed: int) -> StepResult:
        """Start the episode of that seed."""
        if self._counts_scenes:
            self._world.set_attr(_SCENE, seed)
        seen, _ = self._world.reset(seed=[seed])
        return StepResult(observation=self._observation(seen))

    def step(self, action: NDArray[Any]) -> StepResult:
        """Take one action."""
        processed = self._postprocess({ACTION: torch.from_numpy(action[None])})[ACTION]
        seen, _, terminated, truncated, info = self._world.step(processed.cpu().numpy())
        over = bool(terminated[0] or truncated[0])
        # After its last step the world starts the next episode by itself, and `final_info` holds
        # the end of this one.
        succeeded = info.get("final_info", info).get("is_success", [False])
        success = bool(np.asarray(succeeded).reshape(-1)[0])
        return StepResult(
            observation=self._observation(seen), success=success, over=over or success
        )

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
    """The tasks of one of LeRobot's environments, such as pusht or libero:libero_spatial.

    Raises:
        CraftError: the environment is unknown or not installed, or it does not start.
    """
    if kind not in EnvConfig.get_known_choices():
        raise unknown_environment(kind)
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
    except Exception as error:  # simulators raise anything for an unknown task
        raise CraftError(
            f"Cannot create the environment {kind}.",
            why=f"{type(error).__name__}: {error}",
            fix="check the name of the task, and that the simulator runs without craft.",
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
