"""The arms of arms.toml, as a sweep takes them."""

import itertools
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

from craftcli.evaluation.record import FOLDER, Evaluation
from craftcli.sweeps.plan import folder_of
from craftcli.sweeps.spec import SweepSpec

type Entry = dict[str, Any]
"""An [[arm]] of `craft compare --sweep`."""

_FILE = Path(__file__).with_name("arms.toml")
GROUPS: dict[str, list[Entry]] = tomllib.loads(_FILE.read_text("utf-8"))
_SYMBOLS = {"lambda_init": "λ", "alpha": "α"}


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
    for file in (folder_of(spec, name, spec.seeds[0]) / FOLDER).glob("*.json"):
        rates = {found.environment: found.rate for found in Evaluation.load(file).success}
        old, new = (fmean(rates[env] for env in role) for role in (spec.old, spec.new))
        return old, new
    return None
