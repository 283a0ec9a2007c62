"""The settings of the policy, under the type that checkpoints name."""

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs import NormalizationMode, PreTrainedConfig
from lerobot.optim.optimizers import AdamWConfig


@PreTrainedConfig.register_subclass("mixer")
@dataclass
class MixerConfig(PreTrainedConfig):
    """A chunk of actions from the robot's state."""

    n_obs_steps: int = 1
    chunk_size: int = 4
    width: int = 32
    depth: int = 3
    dropout: float = 0.1
    optimizer_lr: float = 1e-3
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {
            "STATE": NormalizationMode.MEAN_STD,
            "ACTION": NormalizationMode.MEAN_STD,
        }
    )

    def validate_features(self) -> None:
        """Refuse features that the policy cannot use."""
        if self.robot_state_feature is None or self.action_feature is None:
            raise ValueError("mixer needs observation.state and action")

    def get_optimizer_preset(self) -> AdamWConfig:
        """The optimizer that LeRobot trains it with."""
        return AdamWConfig(lr=self.optimizer_lr)

    def get_scheduler_preset(self) -> Any:
        """A constant learning rate."""
        return None

    @property
    def observation_delta_indices(self) -> None:
        """No history."""
        return None

    @property
    def action_delta_indices(self) -> list[int]:
        """The actions from now on."""
        return list(range(self.chunk_size))

    @property
    def reward_delta_indices(self) -> None:
        """No rewards."""
        return None
