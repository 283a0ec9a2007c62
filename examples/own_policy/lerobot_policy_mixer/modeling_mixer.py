"""The policy: a token for every step of the chunk, mixed by a few layers."""

from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION, OBS_STATE
from torch import Tensor, nn

from lerobot_policy_mixer.configuration_mixer import MixerConfig


class MixerLayer(nn.Module):
    """Mixes the steps of the chunk, then the numbers of each."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.steps = nn.Linear(config.chunk_size, config.chunk_size)
        self.numbers = nn.Sequential(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, 2 * config.width),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(2 * config.width, config.width),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, chunk, width] -> [B, chunk, width]."""
        tokens = tokens + self.steps(self.norm(tokens).transpose(1, 2)).transpose(1, 2)
        return tokens + self.numbers(tokens)


class MixerPolicy(PreTrainedPolicy):
    """What LeRobot calls: the loss in training, actions in a rollout."""

    config_class = MixerConfig
    name = "mixer"

    def __init__(self, config: MixerConfig, **_: Any) -> None:
        super().__init__(config)
        self.config = config
        self.embed = nn.Linear(config.robot_state_feature.shape[0], config.width)
        self.places = nn.Parameter(torch.randn(config.chunk_size, config.width) * 0.1)
        self.layers = nn.ModuleList(MixerLayer(config) for _ in range(config.depth))
        self.head = nn.Linear(config.width, config.action_feature.shape[0])

    def actions(self, state: Tensor) -> Tensor:
        """[B, chunk, action] from states [B, state]."""
        tokens = self.embed(state).unsqueeze(1) + self.places
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The loss."""
        error = (self.actions(batch[OBS_STATE]) - batch[ACTION]).abs().mean(-1)
        counted = ~batch["action_is_pad"]
        loss = (error * counted).sum() / counted.sum()
        return loss, {"l1_loss": loss.item()}

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        """The actions of a chunk."""
        self.eval()
        return self.actions(batch[OBS_STATE])

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        """The next action."""
        return self.predict_action_chunk(batch)[:, 0]

    def get_optim_params(self) -> Any:
        """What is trained."""
        return self.parameters()

    def reset(self) -> None:
        """Nothing is remembered between steps."""
