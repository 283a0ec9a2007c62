"""What came of rolling a policy out."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from craftcli.evaluation.intervals import wilson


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One rollout."""

    seed: int
    success: bool
    steps: int
    error: str | None = None
    """Why its world crashed; it then counts as failed."""


@dataclass(frozen=True, kw_only=True)
class Success:
    """Closed-loop success of a policy in one environment."""

    environment: str
    group: str | None
    """old or new, where that is known."""
    max_steps: int
    episodes: tuple[Episode, ...]

    @property
    def count(self) -> int:
        """How many episodes succeeded."""
        return sum(episode.success for episode in self.episodes)

    @property
    def rate(self) -> float:
        """The share of episodes that succeeded."""
        return self.count / len(self.episodes)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the rate lies with 95 % confidence (Wilson)."""
        return wilson(self.count, len(self.episodes))

    @property
    def crashed(self) -> tuple[Episode, ...]:
        """Episodes whose world crashed."""
        return tuple(episode for episode in self.episodes if episode.error)

    def to_json(self) -> dict[str, Any]:
        """As JSON; what can be computed from the episodes is there to be read by people."""
        return {"rate": self.rate, "interval": list(self.interval), **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
        return cls(
            environment=document["environment"],
            group=document["group"],
            max_steps=document["max_steps"],
            episodes=tuple(Episode(**episode) for episode in document["episodes"]),
        )
