"""Closed-loop rollouts: episodes of one environment stepped together, with batched inference."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Protocol

import numpy as np
import torch

from craftcli.errors import CraftError
from craftcli.evaluation.seats import LocalSeats, Seats, WorkerSeats
from craftcli.evaluation.simulation import Environment, Moment, Observation
from craftcli.evaluation.success import Episode, Success
from craftcli.policies.base import Batch, Policy

FIRST_SEED = 1000
"""Of evaluation episodes, far from the seeds that data is made with."""
EPISODES = 50


class Actor(Protocol):
    """What acts: a `Checkpoint`, or anything with a policy and its processors."""

    @property
    def policy(self) -> Policy:
        """A LeRobot policy."""
        ...

    @property
    def preprocess(self) -> Any:
        """From what the world shows to what the policy takes."""
        ...

    @property
    def postprocess(self) -> Any:
        """From what the policy gives to what the world takes."""
        ...


def rollout(
    actor: Actor,
    environment: Environment,
    *,
    episodes: int = EPISODES,
    seed: int = FIRST_SEED,
    batch_size: int = EPISODES,
    workers: int = 0,
    on_episodes: Callable[[int], None] = lambda _: None,
) -> Success:
    """Roll a policy out on the episodes of seeds `seed`, `seed + 1`, ...

    `batch_size` of them run together; `workers` processes simulate them, or this one if 0. The
    same arguments give the same result.
    """
    seeds = range(seed, seed + episodes)
    together = min(batch_size, episodes)
    seats: Seats = (
        WorkerSeats(environment.make, together, workers)
        if workers
        else LocalSeats(environment.make, together)
    )
    done: list[Episode] = []
    with closing(seats):
        for start in range(0, episodes, together):
            own = seeds[start : start + together]
            done += _run_together(actor, environment, seats, own, on_episodes)
    return Success(
        environment=environment.name,
        group=environment.group,
        max_steps=environment.max_steps,
        episodes=tuple(done),
    )


@torch.no_grad()
def _run_together(
    actor: Actor,
    environment: Environment,
    seats: Seats,
    seeds: Sequence[int],
    on_episodes: Callable[[int], None],
) -> list[Episode]:
    """Episodes of one batch; the policy's queues of actions and history begin anew with it."""
    policy = actor.policy
    policy.eval()
    policy.reset()
    runs = [_Run(seed, first) for seed, first in zip(seeds, seats.reset(seeds), strict=True)]
    _check_inputs(actor, environment, runs)
    device = next(policy.parameters()).device
    # What a policy draws in acting, noise for one, is a function of the seed and of nothing else.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seeds[0])
        for _ in range(environment.max_steps):
            if all(run.over for run in runs):
                break
            batch = actor.preprocess(_batch(runs))
            actions = actor.postprocess(policy.select_action(batch)).cpu().numpy()
            acting = [None if run.over else actions[i] for i, run in enumerate(runs)]
            for run, moment in zip(runs, seats.step(acting), strict=True):
                if moment is not None:
                    run.take(moment)
                    on_episodes(int(run.over))
    on_episodes(sum(not run.over for run in runs))
    return [run.episode() for run in runs]


class _Run:
    """One episode as it goes on."""

    def __init__(self, seed: int, first: Moment) -> None:
        self.seed = seed
        self.steps = 0
        self.last = first
        self.observation: Observation | None = first.observation

    @property
    def over(self) -> bool:
        return self.last.over

    def take(self, moment: Moment) -> None:
        self.steps += 1
        self.last = moment
        # An episode that is over stays in the batch, with what was seen last.
        self.observation = moment.observation or self.observation

    def episode(self) -> Episode:
        last = self.last
        return Episode(seed=self.seed, success=last.success, steps=self.steps, error=last.error)


def _batch(runs: list[_Run]) -> Batch:
    """What the policy sees of all episodes, as LeRobot's processors take it."""
    seen = [run.observation for run in runs if run.observation is not None]
    # A world that crashed before it was ever seen still has its place in the batch.
    rows = [seen[0] if run.observation is None else run.observation for run in runs]
    return {key: _joined([row[key] for row in rows]) for key in seen[0]}


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], str):
        return values
    stacked = torch.from_numpy(np.stack(values))
    if stacked.dtype == torch.uint8:  # [B, H, W, 3]
        return stacked.permute(0, 3, 1, 2).contiguous().float() / 255
    return stacked


def _check_inputs(actor: Actor, environment: Environment, runs: list[_Run]) -> None:
    """Refuse an environment that does not show what the policy reads, or shows nothing at all."""
    seen = next((run.observation for run in runs if run.observation is not None), None)
    if seen is None:
        raise CraftError(
            f"No world of {environment.name} could be started.",
            why=f"all {len(runs)} crashed at once; the first: {runs[0].last.error}.",
            fix="mend the simulator, then evaluate again.",
        )
    config = actor.policy.config
    cameras = set(config.image_features)
    missing = [key for key in config.input_features if key not in seen and key not in cameras]
    if cameras and not cameras & seen.keys():
        missing += sorted(cameras)
    if missing:
        raise CraftError(
            f"{environment.name} does not show what the policy reads.",
            why=f"it lacks {', '.join(missing)}; it shows {', '.join(seen)}.",
            fix="evaluate in the environment that the policy was trained for.",
        )
