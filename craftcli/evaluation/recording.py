"""Records what a policy sees when it acts itself, successful or not: anchors without old data."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from craftcli.cache.build.recorded_rows import RecordedFrame, RecordedFrames
from craftcli.config.cache import CacheConfig
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.evaluation.results import Success
from craftcli.evaluation.rollouts import Actor, rollout
from craftcli.evaluation.simulators.base import Environment, Observation
from craftcli.evaluation.simulators.by_name import open_environments

FIRST_RECORDED_SEED = 1_000_000
"""Far from the seeds of evaluations, so that no episode that anchors come from is evaluated."""
_SEEDS_PER_BUILD = 1_000
TOGETHER = 32
"""Most episodes that run at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """Frames of a policy's own episodes, and how these went."""

    recorded: RecordedFrames
    frames_seen: int
    """Frames of all episodes, from which the recorded ones were drawn."""
    successes: tuple[Success, ...]
    """The episodes of each environment."""


def record_frames(
    config: CacheConfig,
    actor: Actor,
    *,
    exact: bool = True,
    on_episodes: Callable[[int], None] = lambda _: None,
) -> Recording:
    """Let a policy act in the environments of the settings of a cache (see `record`)."""
    return record(
        actor,
        open_all(config.environments, actor.policy.config),
        episodes=config.env_episodes,
        samples=config.samples,
        seed=config.seed,
        exact=exact,
        on_episodes=on_episodes,
    )


def record(
    actor: Actor,
    environments: Sequence[Environment],
    *,
    episodes: int,
    samples: int,
    seed: int = 0,
    exact: bool = True,
    on_episodes: Callable[[int], None] = lambda _: None,
) -> Recording:
    """Let a policy act in `episodes` episodes of each environment; draw `samples` of all frames.

    Every frame is equally likely. The same arguments give the same frames. If there are
    fewer frames than `samples`, that is an error if `exact`; else all of them are drawn.

    Raises:
        CraftError: The episodes have too few frames, or an environment does not fit the policy.
    """
    longest = episodes * sum(environment.max_steps for environment in environments)
    if exact and longest < samples:
        raise _too_few(longest, environments, episodes, samples, bound="at most ")
    drawn = _Drawn(samples, seed, observation_steps(actor))
    first = FIRST_RECORDED_SEED + _SEEDS_PER_BUILD * (seed % _SEEDS_PER_BUILD)
    successes = []
    for number, environment in enumerate(environments):

        def add(own: int, step: int, seen: Observation, offset: int = number * episodes) -> None:
            drawn.add(offset + own - first, step, seen)

        successes.append(
            rollout(
                actor,
                environment,
                episodes=episodes,
                seed=first,
                batch_size=TOGETHER,
                on_episodes=on_episodes,
                on_frame=add,
            )
        )
    actor.policy.reset()  # forget the last episodes
    if exact and drawn.seen < samples:
        raise _too_few(drawn.seen, environments, episodes, samples)
    recorded = RecordedFrames(
        frames=drawn.frames(),
        environments=tuple(environment.name for environment in environments),
        episodes=episodes * len(environments),
    )
    return Recording(recorded=recorded, frames_seen=drawn.seen, successes=tuple(successes))


def open_all(names: Sequence[str], policy_config: Any) -> list[Environment]:
    """The environments of these names, each once, for a policy of this configuration."""
    found = [e for name in names for e in open_environments(name, policy_config)]
    return list({environment.name: environment for environment in found}.values())


def observation_steps(actor: Actor) -> tuple[int, ...] | None:
    """The observations that a policy reads, relative to the current one; None if only that one."""
    steps = actor.policy.config.observation_delta_indices
    if steps is not None and max(steps) > 0:
        raise CraftError(
            "The anchors of this policy cannot be recorded.",
            why=f"a {actor.policy.config.type} policy reads observations that are still to come "
            "when it acts.",
            fix="take anchors from a dataset (--dataset).",
            exit_code=EXIT_USAGE,
        )
    return None if steps is None else tuple(steps)


class _Drawn:
    """A uniform sample of the frames that are added: those with the smallest random numbers.

    A frame's number depends on the seed, its episode and its step alone, not on the order in which
    frames come, and only the sample is kept in memory.
    """

    def __init__(self, samples: int, seed: int, steps: tuple[int, ...] | None) -> None:
        self.seen = 0
        self._samples = samples
        self._seed = seed
        self._steps = steps
        self._heap: list[tuple[float, int, int, RecordedFrame]] = []
        self._histories: dict[int, deque[Observation]] = {}

    def add(self, episode: int, step: int, seen: Observation) -> None:
        """Add what was seen at a step; the steps of an episode come in order."""
        self.seen += 1
        if step == 0:
            self._histories[episode] = deque(maxlen=1 - min(self._steps or (0,)))
        history = self._histories[episode]
        # Copied: a simulator may reuse its buffers.
        history.append({k: v if isinstance(v, str) else np.array(v) for k, v in seen.items()})
        number = np.random.default_rng([self._seed, episode, step]).random()
        if len(self._heap) == self._samples and -self._heap[0][0] <= number:
            return
        entry = (-number, episode, step, self._frame(episode, step))
        if len(self._heap) < self._samples:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heapreplace(self._heap, entry)

    def frames(self) -> list[RecordedFrame]:
        """The sample, in the order of episodes and steps."""
        return [entry[3] for entry in sorted(self._heap, key=lambda entry: entry[1:3])]

    def _frame(self, episode: int, step: int) -> RecordedFrame:
        history = list(self._histories[episode])
        now = history[-1]
        names = [name for name, value in now.items() if not isinstance(value, str)]
        if self._steps is None:
            observation = {name: now[name] for name in names}
        else:
            # As LeRobot's datasets do: before the first frame of an episode, the first is repeated.
            chosen = [history[max(len(history) - 1 + delta, 0)] for delta in self._steps]
            observation = {name: np.stack([seen[name] for seen in chosen]) for name in names}
        return RecordedFrame(
            episode=episode, frame=step, task=str(now.get("task", "")), observation=observation
        )


def _too_few(
    frames: int,
    environments: Sequence[Environment],
    episodes: int,
    samples: int,
    *,
    bound: str = "",
) -> CraftError:
    names = ", ".join(environment.name for environment in environments)
    return CraftError(
        f"The episodes have too few frames for {samples} anchors.",
        why=f"{episodes} episodes in each of {names} have {bound}{frames} frames.",
        fix="raise --env-episodes, or lower --samples.",
        exit_code=EXIT_USAGE,
    )
