"""One pair of tasks and one family of policies: data, teacher, and everything compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arms import GROUPS, SWEEP, TUNING, Entry, best, choices, fitted
from beginnings import FAMILIES
from experts import write_dataset
from teacher import train_teacher
from varied_replay import with_varied

from craftcli.errors import CraftError
from craftcli.sweeps.progress import Bar, Job
from craftcli.sweeps.runner import run_sweep
from craftcli.sweeps.sweep_file import SweepSpec


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The tasks that a policy knows, and the one that it is to learn."""

    name: str
    old: tuple[str, ...]
    new: str
    as_recorded: bool = False
    """Whether the teacher has its data's statistics as they are, as `lerobot-train` gives them."""


PAIRS = {
    pair.name: pair
    for pair in (
        Pair(name="pick", old=("pick-place-v3",), new="door-open-v3"),
        Pair(name="press", old=("button-press-topdown-v3", "drawer-open-v3"), new="door-open-v3"),
        # The gripper stands still in the old task, and has to close in the new one.
        Pair(name="gripper", old=("faucet-close-v3",), new="pick-place-v3", as_recorded=True),
        # The same, and numbers that hardly moved in the old task.
        Pair(name="still", old=("door-open-v3",), new="pick-place-v3", as_recorded=True),
        # Most of what the new task moves hardly moves in the old one.
        Pair(name="far", old=("reach-v3",), new="door-open-v3", as_recorded=True),
    )
}

SECTIONS = {
    "": ("main", "replay", "penalties", "rest"),
    "-ablations": ("ablations",),
    "-short": ("short",),
    "-share": ("share",),
    "-typed": ("typed",),
    "-coverage": ("coverage",),
    "-recipe": ("recipe",),
    "-few": ("few", "varied"),
    "-little": ("little",),
    "-sources": ("sources",),
    "-depth": ("depth",),
    "-statistics": ("statistics", "statistics_more"),
}
"""Which groups of arms make a table together."""

TUNING_SEED = 0
"""Settings are chosen with this seed and the first episodes; figures come from others."""
REPORTED_EPISODES = 50_000
"""Seed of the first reported episode; demonstrations begin at 100 000."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much is measured, and how much work goes into a figure."""

    pairs: tuple[str, ...] = ("pick", "press")
    groups: tuple[str, ...] = tuple(GROUPS)
    seeds: int = 3
    """Runs of an arm, with the seeds after the one that settings were chosen with."""
    choices: int | None = None
    """Of a grid, from its beginning; None for all."""
    demonstrations: int = 60
    """Episodes of each task."""
    rounds: tuple[tuple[int, float], ...] | None = None
    """Of the teacher's training: steps and learning rate; None for the family's own."""
    steps: int | None = None
    """Of fine-tuning; None for the family's own."""
    anchors: int | None = None
    """None for the family's own."""
    held_out: int = 256
    episodes: int = 50
    max_steps: int = 150


FULL = Extent()
QUICK = Extent(
    pairs=("pick",),
    groups=("main", "replay", "penalties", "coverage"),
    seeds=1,
    choices=2,
    demonstrations=2,
    rounds=((5, 1e-3),),
    steps=5,
    anchors=32,
    held_out=16,
    # The first three reported scenes of pick-place have the object on either side.
    episodes=3,
    max_steps=5,
)


class Bench:
    """Makes data and a teacher, then compares arms; what is done is kept."""

    def __init__(
        self,
        work: Path,
        pair: Pair,
        family: str,
        extent: Extent,
        *,
        on_job: Callable[[Job], None],
        bar: Bar,
    ) -> None:
        self.name = f"{pair.name}-{family}"
        self.folder = work / self.name
        self._on_job, self._bar = on_job, bar
        self._choices = extent.choices
        data = work / "data"
        data.mkdir(parents=True, exist_ok=True)
        old = write_dataset(data / pair.name, pair.old, episodes=extent.demonstrations)
        new = write_dataset(data / pair.new, (pair.new,), episodes=extent.demonstrations)
        kind = FAMILIES[family]
        self._arms = fitted(
            pair.name,
            kind,
            old,
            new,
            ",".join(f"metaworld:{task}" for task in pair.old),
            episodes=extent.demonstrations,
            steps=extent.steps,
            anchors=extent.anchors,
        )
        rounds = extent.rounds or kind.rounds
        self._old = old
        self._teacher = teacher = train_teacher(
            self.folder, family, old, rounds, bar, as_recorded=pair.as_recorded
        )
        self._document: dict[str, Any] = {
            "title": f"{', '.join(pair.old)} → {pair.new} ({family})",
            "old": [f"metaworld:{task}" for task in pair.old],
            "new": [f"metaworld:{pair.new}"],
            "cache": {
                "dataset": str(old),
                "samples": extent.anchors or kind.anchors,
                "kind": "hidden+action",
            },
            "held_out": {"samples": extent.held_out},
            "train": {
                "policy": str(teacher),
                "dataset": str(new),
                "steps": extent.steps or kind.steps,
                "batch_size": 32,
                "lr": kind.lr,
                "lr_schedule": "cosine",
                "save_every": 0,
            },
            # A world takes longer to make than an episode.
            "eval": {"episodes": extent.episodes, "max_steps": extent.max_steps, "batch_size": 10},
        }

    def compare(
        self,
        groups: Sequence[str],
        seeds: int,
        arms: Sequence[str] | None = None,
        *,
        tuning: bool = False,
    ) -> dict[str, SweepSpec]:
        """Train and measure arms; the sweeps by name, one for each table of the report.

        `arms` are the names of those to take; None for all of the groups.
        `tuning` takes the seed and the episodes that settings are chosen with instead.
        """
        own = [TUNING_SEED] if tuning else [TUNING_SEED + 1 + n for n in range(seeds)]
        specs = {}
        for section, members in SECTIONS.items():
            wanted = [
                [
                    with_varied(entry, self.folder, self._old, self._teacher)
                    for entry in self._arms[group]
                    if arms is None or entry["name"] in arms
                ]
                for group in members
                if group in groups
            ]
            if any(wanted):
                chosen = self._chosen(section, wanted, own)
                specs[self.name + section] = self._run(section, chosen, tuning=tuning)
        return specs

    def _chosen(
        self, section: str, groups: Sequence[Sequence[Entry]], seeds: list[int]
    ) -> list[Entry]:
        """The arms with these seeds; of a grid, the best with the seed for tuning."""
        chosen: list[Entry] = []
        for group in groups:
            offered = [choices(entry)[: self._choices] for entry in group]
            if any(len(arms) > 1 for arms in offered):
                # Earlier arms come along because merges are made of one of them.
                tried = [*chosen, *(choice for arms in offered for choice in arms)]
                tuned = [{**entry, "seeds": [TUNING_SEED]} for entry in tried]
                spec = self._run(section, tuned, tuning=True)
                offered = [[best(spec, arms)] for arms in offered]
            chosen += [{"seeds": seeds, **arms[0]} for arms in offered]
        return chosen

    def _run(self, section: str, entries: list[Entry], *, tuning: bool) -> SweepSpec:
        output = f"{TUNING if tuning else SWEEP}{section}"
        document = {**self._document, "output": output, "arm": entries}
        if not tuning:
            document["eval"] = {**document["eval"], "seed": REPORTED_EPISODES}
        spec = SweepSpec.from_dict(document, folder=self.folder)
        result = run_sweep(spec, on_job=self._on_job, bar=self._bar)
        if result.interrupted:
            raise KeyboardInterrupt
        for what, error in result.failures.items():
            raise CraftError(f"{what} failed: {error.what}", why=error.why, fix=error.fix)
        return spec
