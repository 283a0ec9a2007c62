"""Meta-World as a simulation: states without rendering, images only if a policy reads them.

An episode's seed alone decides where the objects and the goal are, as in Meta-World's multi-task
training; the goal is part of the observation. An episode succeeds at the first step that Meta-World
counts as a success. Images are rendered without shadows, reflections and sky, so they suit policies
trained on data that was recorded with this module.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.evaluation.simulators.base import StepResult

VECTORS = ("observation.state", "observation.environment_state")
"""Inputs that may hold the state; some LeRobot policies without images need the second."""
STATE_SIZE = 39
"""Hand and objects now, hand and objects a step earlier, and the goal."""
HAND_SIZE = 4
"""The hand alone: the first numbers, and the whole state in LeRobot's Meta-World datasets."""
DEFAULT_CAMERA = "corner2"
DEFAULT_STEPS = 200


class MetaWorld:
    """One task, such as reach-v3.

    `vectors` maps the inputs that hold the state to how many of its first numbers they take;
    `cameras` maps the images to render to their [H, W].
    """

    def __init__(
        self,
        task: str,
        *,
        instruction: str,
        vectors: Mapping[str, int],
        cameras: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        from metaworld import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE

        self._instruction = instruction
        self._vectors = dict(vectors)
        self._env: Any = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-goal-observable"](seed=0)
        # Meta-World's switches: without them every episode repeats the first one.
        self._env._freeze_rand_vec = False
        self._env.seeded_rand_vec = True
        self._cameras = {
            name: _Camera(self._env, name, size) for name, size in (cameras or {}).items()
        }

    def reset(self, seed: int) -> StepResult:
        """Draw objects and goal from the seed."""
        self._env.seed(seed)
        state, _ = self._env.reset()
        return self._result(state, success=False, over=False)

    def step(self, action: NDArray[Any]) -> StepResult:
        """Take one action, clipped to -1..1."""
        bounded = np.clip(np.asarray(action, dtype=np.float64), -1.0, 1.0)
        state, _, _, truncated, info = self._env.step(bounded)
        success = bool(info["success"])
        return self._result(state, success=success, over=success or truncated)

    def close(self) -> None:
        """Free the renderers."""
        for camera in self._cameras.values():
            camera.close()
        self._env.close()

    def _result(self, state: NDArray[Any], *, success: bool, over: bool) -> StepResult:
        observation: dict[str, Any] = {"task": self._instruction}
        for name, size in self._vectors.items():
            observation[name] = state[:size].astype(np.float32)
        observation |= {name: camera.picture() for name, camera in self._cameras.items()}
        return StepResult(observation=observation, success=success, over=over)


class _Camera:
    """A camera of the scene: the one named by the last part of the input, or the default."""

    def __init__(self, env: Any, name: str, size: tuple[int, int]) -> None:
        import mujoco

        own = name.rpartition(".")[2]
        known = [env.model.camera(i).name for i in range(env.model.ncam)]
        self._name = own if own in known else DEFAULT_CAMERA
        self._data = env.data
        if self._name == DEFAULT_CAMERA:
            # Closer, where LeRobot's Meta-World datasets were recorded.
            env.model.camera(self._name).pos = [0.75, 0.075, 0.7]
        # Without a GPU, antialiasing and (below) shadows take most of the rendering time.
        env.model.vis.quality.offsamples = 0
        height, width = size
        self._renderer = mujoco.Renderer(env.model, height, width)
        for flag in ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX"):
            self._renderer.scene.flags[getattr(mujoco.mjtRndFlag, flag)] = 0

    def picture(self) -> NDArray[np.uint8]:
        """[H, W, 3] uint8."""
        self._renderer.update_scene(self._data, camera=self._name)
        image: NDArray[np.uint8] = self._renderer.render()
        # This camera hangs upside down; LeRobot flips its images too.
        return np.flip(image, (0, 1)).copy() if self._name == DEFAULT_CAMERA else image

    def close(self) -> None:
        """Free the graphics context."""
        self._renderer.close()
