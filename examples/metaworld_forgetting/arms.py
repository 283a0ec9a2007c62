"""The arms of arms.toml, as a sweep takes them."""

import copy
import itertools
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

from beginnings import Family
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from views import WORLD

from craftcli.evaluation.results import EVALUATIONS_FOLDER, Evaluation
from craftcli.sweeps.plan import folder_of
from craftcli.sweeps.sweep_file import SweepSpec

type Entry = dict[str, Any]
"""An [[arm]] of `craft compare --sweep`."""

_FILE = Path(__file__).with_name("arms.toml")
GROUPS: dict[str, list[Entry]] = tomllib.loads(_FILE.read_text("utf-8"))
_SYMBOLS = {"lambda_init": "λ", "alpha": "α"}
SWEEP, TUNING = "sweep", "tuning"
"""What the folders of a bench begin with: reported runs, and those that settings were chosen by."""
OBJECT_X = 4
"""Where in the state the object lies, from left (negative) to right."""


def fitted(
    pair: str,
    family: Family,
    old: Path,
    new: Path,
    environments: str,
    *,
    episodes: int,
    steps: int | None,
    anchors: int | None = None,
) -> dict[str, list[Entry]]:
    """The groups with the arms of a pair, and the family's and the data's own names filled in.

    `environments` are those of the old tasks, with commas.
    No arm trains for more than `steps`, or has more than `anchors` frames, if given.
    """
    groups = copy.deepcopy(GROUPS)
    names = {"PERCEPTION": family.perception, "left": None, "first": f"0-{episodes - 1}"}
    found = {}
    for group, entries in groups.items():
        found[group] = [entry for entry in entries if pair in entry.pop("only", [pair])]
        for entry in found[group]:
            cache, train = entry.get("cache", {}), entry.get("train", {})
            if cache.get("episodes") == "left":
                names["left"] = names["left"] or _left(old)
            for name in ("stack", "episodes"):
                if name in cache:
                    cache[name] = names.get(cache[name], cache[name])
            if "moves_like" in cache:
                cache["moves_like"] = str(new)
            as_they_are = "samples" in cache and not cache.keys() & {"augment", "from_statistics"}
            if family.draws > 1 and as_they_are and train.get("mode") != "replay":
                cache["draws"] = family.draws
            if "augment" in cache and "dataset" not in cache:
                # As craft train does: variations have one draw each.
                cache["augment"] = (cache["augment"] + 1) * family.draws - 1
            if anchors is not None and "samples" in cache:
                cache["samples"] = min(anchors, cache["samples"])
                if "augment" in cache:
                    cache["augment"] = min(3, cache["augment"])
            if "steps" in train:
                train["steps"] = min(steps or family.short_steps, family.short_steps)
                train["lr"] = family.short_lr
            for name, value in (("old_env", environments), ("old_dataset", str(old))):
                if name in train:
                    train[name] = value
            if "lora" in train:
                train["lora"] = train["lora"].replace("LORA", family.lora_targets)
    return found


def _left(old: Path) -> str:
    """Episodes whose object starts on the left, as `craft cache build --episodes` takes them."""
    data = LeRobotDataset(old.name, root=old)
    starts = data.meta.episodes["dataset_from_index"]
    left = [i for i, start in enumerate(starts) if data[int(start)][WORLD][OBJECT_X] < 0]
    return ",".join(map(str, left))


def choices(entry: Entry) -> list[Entry]:
    """The arms that an entry with a grid is chosen from, or the entry itself."""
    if "grid" not in entry:
        return [entry]
    found = []
    for point in itertools.product(*entry["grid"].values()):
        chosen = dict(zip(entry["grid"], point, strict=True))
        value = ", ".join(f"{_SYMBOLS.get(k, k)} {v:g}" for k, v in chosen.items())
        kind = "merge" if "merge" in entry else "train"
        own = {key: entry[key] for key in entry if key != "grid"}
        settings = {**entry[kind], **chosen}
        found.append({**own, "name": f"{entry['name']}, {value}", kind: settings})
    return found


def best(spec: SweepSpec, entries: list[Entry]) -> Entry:
    """The choice with the most old and new success together at the first seed."""
    if len(entries) == 1:
        return entries[0]
    return max(entries, key=lambda entry: sum(success(spec, entry["name"]) or (0.0,)))


def success(spec: SweepSpec, name: str) -> tuple[float, float] | None:
    """Old and new success of an arm at the first seed; None if it was not measured yet."""
    for file in (folder_of(spec, name, spec.seeds[0]) / EVALUATIONS_FOLDER).glob("*.json"):
        rates = {found.environment: found.rate for found in Evaluation.load(file).success}
        old, new = (fmean(rates[env] for env in role) for role in (spec.old, spec.new))
        return old, new
    return None
