"""Closed-loop success in the demo's world: `python -m craftcli.demo.evaluate [POLICY ...]`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from craftcli.demo.world import NEW_COLOURS, OLD_COLOURS
from craftcli.evaluation.blocks import block_environments
from craftcli.evaluation.rollouts import rollout


@dataclass(frozen=True, kw_only=True)
class Success:
    """Share of successful rollouts for every instruction."""

    by_colour: Mapping[str, float]
    rollouts: int

    @property
    def old(self) -> float:
        """Mean over the instructions the teacher knows."""
        return float(np.mean([self.by_colour[colour] for colour in OLD_COLOURS]))

    @property
    def new(self) -> float:
        """Mean over the instructions that fine-tuning teaches."""
        return float(np.mean([self.by_colour[colour] for colour in NEW_COLOURS]))


@dataclass(frozen=True, kw_only=True)
class Actor:
    """A policy and its processors."""

    policy: Any
    preprocess: Any
    postprocess: Any


def evaluate(policy: Any, preprocess: Any, postprocess: Any, *, rollouts: int) -> Success:
    """Roll the policy out `rollouts` times for every instruction, on the same scenes each time."""
    actor = Actor(policy=policy, preprocess=preprocess, postprocess=postprocess)
    by_colour = {
        environment.name.removeprefix("demo:"): rollout(
            actor, environment, episodes=rollouts, batch_size=rollouts
        ).rate
        for environment in block_environments()
    }
    return Success(by_colour=by_colour, rollouts=rollouts)


def main(
    policies: Annotated[list[str] | None, typer.Argument()] = None, rollouts: int = 50
) -> None:
    """Print success on the old and the new instructions for every policy or run given."""
    from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
    from craftcli.policies.loading import load_checkpoint

    for source in policies or [str(TEACHER_FOLDER)]:
        checkpoint = load_checkpoint(source, device="cpu")
        success = evaluate(
            checkpoint.policy, checkpoint.preprocess, checkpoint.postprocess, rollouts=rollouts
        )
        each = " ".join(f"{colour}={rate:.2f}" for colour, rate in success.by_colour.items())
        typer.echo(f"{source} old={success.old:.2f} new={success.new:.2f} ({each})")


if __name__ == "__main__":
    typer.run(main)
