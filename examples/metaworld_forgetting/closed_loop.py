"""Success in closed loop, measured in this process; every finished task is kept in a file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench import REPORTED_EPISODES
from views import View

from craftcli.evaluation.rollouts import rollout
from craftcli.evaluation.simulators.base import Environment
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.task_processors import for_old_tasks, with_saved_teacher

BATCH_SIZE = 10


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """How success is measured."""

    view: View
    max_steps: int
    first_episode: int = REPORTED_EPISODES

    def measure(self, policy: Path, file: Path, episodes: Mapping[str, int]) -> tuple[float, ...]:
        """Success on tasks, over so many episodes each; those in the file are not run again."""
        known = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        # Outcomes by task and first episode, because tuning has episodes of its own.
        keys = {task: f"{task}/{self.first_episode}" for task in episodes}
        missing = {task: n for task, n in episodes.items() if len(known.get(keys[task], ())) < n}
        if not missing:
            return _rates(known, keys, episodes)
        actor = _open(policy)
        for task, number in missing.items():
            environment = Environment(
                name=f"metaworld:{task}", make=self.view.worlds(task), max_steps=self.max_steps
            )
            found = rollout(
                actor,
                environment,
                episodes=number,
                seed=self.first_episode,
                batch_size=BATCH_SIZE,
            )
            known[keys[task]] = [int(episode.success) for episode in found.episodes]
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(known), "utf-8")
            partial.replace(file)
        return _rates(known, keys, episodes)


def _rates(
    known: Mapping[str, Sequence[int]], keys: Mapping[str, str], episodes: Mapping[str, int]
) -> tuple[float, ...]:
    return tuple(fmean(known[keys[task]][:number]) for task, number in episodes.items())


def _open(policy: Path) -> Checkpoint:
    # One set of processors has to serve all tasks; if the last task has its own, it is measured
    # with those of the others, as a policy is that cannot choose.
    return for_old_tasks(with_saved_teacher(load_checkpoint(str(policy), device="cpu")))
