"""Meta-World as a simulation: states without rendering, and images when a policy reads them.

Where the objects and the goal are is drawn anew for every episode, from its seed alone, as in
Meta-World's multi-task training; the goal is part of the observation. An episode succeeds at the
first step at which Meta-World says so. Images are rendered without shadows, reflections and sky:
they suit policies whose data was recorded through this module.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.evaluation.simulation import Moment

VECTORS = ("observation.state", "observation.environment_state")
"""What a policy may read the state as; some of LeRobot's need the second if they see no image."""
STATE_SIZE = 39
"""Hand, objects, the same a step earlier, and the goal."""
HAND_SIZE = 4
"""The first of them, which is all that LeRobot's own Meta-World datasets have as state."""
DEFAULT_CAMERA = "corner2"
DEFAULT_STEPS = 200


class MetaWorld:
    """One task, such as reach-v3.

    `vectors` are the inputs that get the state, or as much of its beginning as they take, by name;
    `cameras` are the images to render, [H, W] by name.
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
        # Meta-World's own switches: without them every episode is the first one again.
        self._env._freeze_rand_vec = False
        self._env.seeded_rand_vec = True
        self._cameras = {
            name: _Camera(self._env, name, size) for name, size in (cameras or {}).items()
        }

    def reset(self, seed: int) -> Moment:
        """Draw objects and goal from the seed."""
        self._env.seed(seed)
        state, _ = self._env.reset()
        return self._moment(state, success=False, over=False)

    def step(self, action: NDArray[Any]) -> Moment:
        """Act once, within the bounds of an action."""
        bounded = np.clip(np.asarray(action, dtype=np.float64), -1.0, 1.0)
        state, _, _, truncated, info = self._env.step(bounded)
        success = bool(info["success"])
        return self._moment(state, success=success, over=success or truncated)

    def close(self) -> None:
        """Free the renderers."""
        for camera in self._cameras.values():
            camera.close()
        self._env.close()

    def _moment(self, state: NDArray[Any], *, success: bool, over: bool) -> Moment:
        observation: dict[str, Any] = {"task": self._instruction}
        for name, size in self._vectors.items():
            observation[name] = state[:size].astype(np.float32)
        observation |= {name: camera.picture() for name, camera in self._cameras.items()}
        return Moment(observation=observation, success=success, over=over)


class _Camera:
    """A camera of the simulated scene, named by the last part of the policy's input."""

    def __init__(self, env: Any, name: str, size: tuple[int, int]) -> None:
        import mujoco

        own = name.rpartition(".")[2]
        known = [env.model.camera(i).name for i in range(env.model.ncam)]
        self._name = own if own in known else DEFAULT_CAMERA
        self._data = env.data
        if self._name == DEFAULT_CAMERA:
            # Closer, as in LeRobot's Meta-World, whose datasets are taken from there.
            env.model.camera(self._name).pos = [0.75, 0.075, 0.7]
        # Smooth edges, and below shadows and the like, take most of the time without a GPU.
        env.model.vis.quality.offsamples = 0
        height, width = size
        self._renderer = mujoco.Renderer(env.model, height, width)
        for flag in ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX"):
            self._renderer.scene.flags[getattr(mujoco.mjtRndFlag, flag)] = 0

    def picture(self) -> NDArray[np.uint8]:
        """[H, W, 3] uint8."""
        self._renderer.update_scene(self._data, camera=self._name)
        image: NDArray[np.uint8] = self._renderer.render()
        # That camera hangs upside down, and LeRobot turns its images.
        return np.flip(image, (0, 1)).copy() if self._name == DEFAULT_CAMERA else image

    def close(self) -> None:
        """Free the graphics context."""
        self._renderer.close()
