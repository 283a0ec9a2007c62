"""The settings of the world, under the type that `--env.type` names."""

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig

from lerobot_env_table.world import FPS


@EnvConfig.register_subclass("table")
@dataclass
class TableConfig(EnvConfig):
    """`--env.task` is the block to touch: red or blue."""

    task: str | None = "red"
    fps: int = FPS
    features: dict[str, PolicyFeature] = field(
        default_factory=lambda: {
            "action": PolicyFeature(type=FeatureType.ACTION, shape=(2,)),
            "agent_pos": PolicyFeature(type=FeatureType.STATE, shape=(2,)),
            "environment_state": PolicyFeature(type=FeatureType.ENV, shape=(5,)),
        }
    )
    features_map: dict[str, str] = field(
        default_factory=lambda: {
            "action": "action",
            "agent_pos": "observation.state",
            "environment_state": "observation.environment_state",
        }
    )

    @property
    def package_name(self) -> str:
        """Where the worlds are registered."""
        return "lerobot_env_table"

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """Arguments of the world beside its task."""
        return {}
