"""Closed-loop success in the demo's world: `python -m craftcli.demo.evaluate [POLICY ...]`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer

from craftcli.demo.datasets import CAMERA
from craftcli.demo.world import EPISODE_STEPS, NEW_COLOURS, OLD_COLOURS, BlockWorld

ROLLOUT_SEED = 1000
"""Scenes of the rollouts; the datasets are drawn from other seeds."""


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


def evaluate(policy: Any, preprocess: Any, postprocess: Any, *, rollouts: int) -> Success:
    """Roll the policy out `rollouts` times for every instruction, on the same scenes each time."""
    by_colour = {
        colour: success_rate(policy, preprocess, postprocess, colour, rollouts=rollouts)
        for colour in (*OLD_COLOURS, *NEW_COLOURS)
    }
    return Success(by_colour=by_colour, rollouts=rollouts)


@torch.no_grad()
def success_rate(
    policy: Any, preprocess: Any, postprocess: Any, colour: str, *, rollouts: int
) -> float:
    """Share of rollouts that end with the hand on the block; all of them run as one batch."""
    policy.eval()
    policy.reset()
    worlds = [BlockWorld(colour) for _ in range(rollouts)]
    seen = [world.reset(seed=ROLLOUT_SEED + i)[0] for i, world in enumerate(worlds)]
    reached = [False] * rollouts
    for _ in range(EPISODE_STEPS):
        pixels = torch.from_numpy(np.stack([o["pixels"] for o in seen]))
        batch = preprocess(
            {
                CAMERA: pixels.permute(0, 3, 1, 2).float() / 255,
                "observation.state": torch.from_numpy(np.stack([o["agent_pos"] for o in seen])),
                "task": [world.task for world in worlds],
            }
        )
        actions = postprocess(policy.select_action(batch)).numpy()
        for i, world in enumerate(worlds):
            seen[i], _, _, _, info = world.step(actions[i])
            reached[i] = info["is_success"]
    return float(np.mean(reached))


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
