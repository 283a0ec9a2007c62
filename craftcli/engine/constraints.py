"""L_ret <= ε as the engine handles it: a budget, a multiplier, and what to say about them."""

import math
from collections.abc import Mapping
from typing import Any

from craftcli.choices import Controller, Schedule
from craftcli.config import RetentionConfig
from craftcli.engine.calibration import AutoEpsilon
from craftcli.engine.multiplier import Multiplier
from craftcli.engine.schedules import epsilon_at, warmed_up
from craftcli.engine.watch import LambdaWatch


class Constraint:
    """One loss that has to stay below its budget."""

    def __init__(self, config: RetentionConfig, *, total_steps: int) -> None:
        self._config = config
        self._total_steps = total_steps
        gains = {}
        if config.controller is Controller.NUPI:
            gains = {"kp": config.lambda_kp, "nu": config.lambda_nu}
        self._multiplier = Multiplier(
            value=config.lambda_init, lr=config.lambda_lr, maximum=config.lambda_max, **gains
        )
        self._auto: AutoEpsilon | None = None
        self._watch = LambdaWatch()

    def __repr__(self) -> str:
        return f"Constraint({self._multiplier!r}, {self._auto or self._config.budget})"

    @property
    def lam(self) -> float:
        """λ now."""
        return self._multiplier.value

    def weight(self, turn: int) -> float:
        """The λ that the gradients of a retention turn are merged with."""
        return warmed_up(self.lam, turn, turns=self._config.lambda_warmup)

    def epsilon(self, step: int) -> float:
        """The budget at a step, counted from 0; infinite while it is still being found."""
        if self._config.schedule is Schedule.AUTO:
            return math.inf if self._auto is None else self._auto.value
        start, end = self._config.budget
        return epsilon_at(
            step,
            schedule=self._config.schedule,
            start=start,
            end=end,
            total_steps=self._total_steps,
        )

    def update(self, loss: float, step: int) -> list[str]:
        """Take the dual step after a retention turn; what there is to say to the user."""
        epsilon = self.epsilon(step)
        said = [self._calibrate(loss)]
        if math.isfinite(epsilon):
            self._multiplier.step(loss - epsilon)
            said.append(
                self._watch.observe(
                    self.lam,
                    at_maximum=self._multiplier.at_maximum,
                    at_zero=self._multiplier.at_zero,
                    violated=loss > epsilon,
                )
            )
        return [text for text in said if text]

    def _calibrate(self, loss: float) -> str | None:
        if self._config.schedule is not Schedule.AUTO:
            return None
        if self._auto is None:
            # The first turn comes before the first update: the student still is its teacher.
            # 1 - cos of equal vectors may be a rounding error below 0.
            self._auto = AutoEpsilon(floor=max(loss, 0.0))
        return self._auto.observe(loss)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {
            "multiplier": self._multiplier.state_dict(),
            "auto": None if self._auto is None else self._auto.state_dict(),
            "watch": self._watch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._multiplier.load_state_dict(state["multiplier"])
        self._watch.load_state_dict(state["watch"])
        if state["auto"] is not None:
            self._auto = AutoEpsilon(floor=0.0)
            self._auto.load_state_dict(state["auto"])
