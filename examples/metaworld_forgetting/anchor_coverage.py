"""Old success apart for what the anchors cover and for what they do not."""

from collections.abc import Callable
from functools import cache

from arms import OBJECT_X
from views import VECTORS, WORLD

from craftcli.compare.compare import ArmResult, Comparison
from craftcli.compare.estimates import Rate, success_over_seeds
from craftcli.compare.runs import NEW, OLD
from craftcli.evaluation.results import Episode
from craftcli.evaluation.simulators.metaworld import MetaWorld

HEAD = "| arm | seeds | old, anchored | old, not anchored | new |\n|---|---|---|---|---|"

type Belongs = Callable[[str, Episode], bool]
"""Whether an episode of an environment is counted."""


def coverage_table(comparison: Comparison) -> str:
    """Success on the old tasks by whether an anchor was near, and on the new one."""
    old = [env for env, role in comparison.environments.items() if role == OLD]
    new = [env for env, role in comparison.environments.items() if role == NEW]

    def anchored(arm: str, env: str, episode: Episode) -> bool:
        """Those without anchors are split as the arms are that have some for a part only."""
        if arm.startswith("16"):
            return True
        return env == old[0] if len(old) > 1 else starts_left(env, episode.seed)

    rows = [HEAD]
    for row in comparison.rows:
        label = row.arm.label
        parts: list[tuple[list[str], Belongs]] = [
            (old, lambda env, episode, arm=label: anchored(arm, env, episode)),
            (old, lambda env, episode, arm=label: not anchored(arm, env, episode)),
            (new, lambda env, episode: True),
        ]
        cells = [_success(row, envs, belongs) for envs, belongs in parts]
        seeds = "" if row is comparison.teacher else row.arm.seeds
        rows.append(f"| {label} | {seeds} | {' | '.join(cells)} |")
    return "\n".join(rows)


@cache
def starts_left(env: str, seed: int) -> bool:
    """Whether the object of an episode starts on the left."""
    moment = _world(env).reset(seed)
    return moment.observation is not None and bool(moment.observation[WORLD][OBJECT_X] < 0)


@cache
def _world(env: str) -> MetaWorld:
    return MetaWorld(env.partition(":")[2], instruction="", vectors=VECTORS)


def _success(row: ArmResult, environments: list[str], belongs: Belongs) -> str:
    """Over all seeds, with an interval; a dash where there is no such episode."""
    rates = []
    for run in row.arm.runs:
        found = run.measured.successes if run.measured else {}
        counted = [
            episode.success
            for env in environments
            for episode in (found[env].episodes if env in found else ())
            if belongs(env, episode)
        ]
        if counted:
            rates.append(Rate(count=sum(counted), trials=len(counted)))
    if not rates:
        return "–"
    figure = success_over_seeds(rates)
    return f"{figure.mean:.2f} [{figure.low:.2f}, {figure.high:.2f}]"
