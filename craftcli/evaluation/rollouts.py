"""Closed-loop rollouts: episodes of one environment step together, with batched inference."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Protocol

import torch

from craftcli.errors import CraftError
from craftcli.evaluation.parallel_worlds import LocalWorlds, WorkerWorlds, Worlds
from craftcli.evaluation.results import Episode, Success
from craftcli.evaluation.simulators.base import Environment, Observation, StepResult
from craftcli.policies.base import Batch, Policy
from craftcli.policies.lerobot.batches import stack_observations

FIRST_SEED = 1000
"""Seed of the first evaluation episode, far from the seeds that datasets are made with."""
EPISODES = 50

type OnFrame = Callable[[int, int, Observation], None]
"""Gets the seed of an episode, the step in it, and what the policy sees at that step."""


class Actor(Protocol):
    """A policy with its processors, such as a `Checkpoint`."""

    @property
    def policy(self) -> Policy:
        """A LeRobot policy."""
        ...

    @property
    def preprocess(self) -> Any:
        """Turns observations into the policy's inputs."""
        ...

    @property
    def postprocess(self) -> Any:
        """Turns the policy's outputs into actions of the world."""
        ...

    @property
    def renames(self) -> Mapping[str, str]:
        """What `preprocess` renames, from the world's names to the policy's."""
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
    on_frame: OnFrame = lambda seed, step, seen: None,
) -> Success:
    """Roll a policy out in the episodes of seeds `seed`, `seed + 1`, ...

    `batch_size` episodes run together; `workers` processes simulate them, or this process if 0.
    `on_frame` gets every observation on which the policy acts.
    The same arguments give the same result.

    Raises:
        CraftError: the environment lacks inputs of the policy, or none of its worlds starts.
    """
    seeds = range(seed, seed + episodes)
    together = min(batch_size, episodes)
    worlds: Worlds = (
        WorkerWorlds(environment.make, together, workers)
        if workers
        else LocalWorlds(environment.make, together)
    )
    done: list[Episode] = []
    with closing(worlds):
        for start in range(0, episodes, together):
            own = seeds[start : start + together]
            done += _run_together(actor, environment, worlds, own, on_episodes, on_frame)
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
    worlds: Worlds,
    seeds: Sequence[int],
    on_episodes: Callable[[int], None],
    on_frame: OnFrame,
) -> list[Episode]:
    """Run the episodes of one batch, with the policy's action queue and history reset."""
    policy = actor.policy
    policy.eval()
    policy.reset()
    runs = [_Run(seed, first) for seed, first in zip(seeds, worlds.reset(seeds), strict=True)]
    _check_inputs(actor, environment, runs)
    device = next(policy.parameters()).device
    # Some policies draw noise when they act: it depends on the seed alone.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seeds[0])
        for _ in range(environment.max_steps):
            if all(run.over for run in runs):
                break
            for run in runs:
                if not run.over and run.observation is not None:
                    on_frame(run.seed, run.steps, run.observation)
            batch = actor.preprocess(_batch(runs))
            actions = actor.postprocess(policy.select_action(batch)).cpu().numpy()
            acting = [None if run.over else actions[i] for i, run in enumerate(runs)]
            for run, result in zip(runs, worlds.step(acting), strict=True):
                if result is not None:
                    run.add(result)
                    on_episodes(int(run.over))
    on_episodes(sum(not run.over for run in runs))
    return [run.episode() for run in runs]


class _Run:
    """An episode in progress."""

    def __init__(self, seed: int, first: StepResult) -> None:
        self.seed = seed
        self.steps = 0
        self.last = first
        self.observation: Observation | None = first.observation

    @property
    def over(self) -> bool:
        return self.last.over

    def add(self, result: StepResult) -> None:
        self.steps += 1
        self.last = result
        # A crashed world has no observation: it stays in the batch with its last one.
        self.observation = result.observation or self.observation

    def episode(self) -> Episode:
        last = self.last
        return Episode(seed=self.seed, success=last.success, steps=self.steps, error=last.error)


def _batch(runs: list[_Run]) -> Batch:
    """The observations of all episodes, as LeRobot's preprocessors take them."""
    seen = [run.observation for run in runs if run.observation is not None]
    # A world that crashed at its reset keeps its row, with another world's observation.
    rows = [seen[0] if run.observation is None else run.observation for run in runs]
    return {key: stack_observations([row[key] for row in rows]) for key in seen[0]}


def _check_inputs(actor: Actor, environment: Environment, runs: list[_Run]) -> None:
    """Refuse an environment that lacks inputs of the policy, or that gives no observation."""
    seen = next((run.observation for run in runs if run.observation is not None), None)
    if seen is None:
        raise CraftError(
            f"Cannot start {environment.name}.",
            why=f"all {len(runs)} worlds crashed at their reset; the first: {runs[0].last.error}.",
            fix="repair the simulator, then evaluate again.",
        )
    config = actor.policy.config
    cameras = set(config.image_features)
    given = {*seen, *(actor.renames.get(key, key) for key in seen)}
    missing = [key for key in config.input_features if key not in given and key not in cameras]
    if cameras and not cameras & given:
        missing += sorted(cameras)
    if missing:
        raise CraftError(
            f"{environment.name} lacks inputs of the policy.",
            why=f"{', '.join(missing)} are missing; it gives {', '.join(seen)}.",
            fix="evaluate in the environment that the policy was trained for.",
        )
