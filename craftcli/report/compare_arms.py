"""Runs that differ in nothing but their seed, put together and named by what sets them apart."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from craftcli.report.compare_runs import RunRecord
from craftcli.settings import option_name

# What changes nothing about what is learned, and what is known better from the summary.
_NO_DIFFERENCE = frozenset(
    {
        "seed",
        "output",
        "overwrite",
        "resume",
        "device",
        "workers",
        "log_every",
        "save_every",
        "tracker",
        "cache",
        "anchor_root",
    }
)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way of fine-tuning, with one run for every seed."""

    number: int
    """As the table and the picture count, from 1."""
    hue: int
    """Which colour it has, from 1; points of one curve share theirs."""
    label: str
    runs: tuple[RunRecord, ...]

    @property
    def seeds(self) -> int:
        """How many runs there are."""
        return len(self.runs)


def group_arms(records: Sequence[RunRecord]) -> list[Arm]:
    """Arms in the order in which their first runs were given."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(_key(record), []).append(record)
    labels = _labels([runs[0] for runs in groups.values()])
    hues: dict[tuple[str | None, str | None], int] = {}
    arms = []
    for number, (label, (key, runs)) in enumerate(zip(labels, groups.items(), strict=True), 1):
        curve = runs[0].curve
        hue = hues.setdefault((curve, None if curve else key), len(hues) + 1)
        arms.append(Arm(number=number, hue=hue, label=label, runs=tuple(runs)))
    return arms


def _key(record: RunRecord) -> str:
    if record.arm is not None:
        return record.arm
    if record.kind == "run":
        return json.dumps(_distinguishing(record), sort_keys=True)
    # Nothing says of which seed a merged policy is.
    return str(record.folder)


def _distinguishing(record: RunRecord) -> dict[str, Any]:
    """Everything that may set a run apart from another arm's."""
    settings = {n: v for n, v in record.settings.items() if n not in _NO_DIFFERENCE}
    if record.summary and record.summary.anchor_targets:
        settings["anchors"] = record.summary.anchors
        targets = record.summary.anchor_targets
        settings |= {f"cache {name}": value for name, value in targets.items()}
    return settings


def _labels(firsts: Sequence[RunRecord]) -> list[str]:
    """A name for every arm: the sweep's, or its mode and whatever else sets it apart."""
    unnamed = [_distinguishing(r) for r in firsts if r.arm is None and r.kind == "run"]
    differing = _differing(unnamed)
    labels = [_label(record, differing) for record in firsts]
    return [
        label if labels.count(label) == 1 else f"{label} ({record.folder.name})"
        for label, record in zip(labels, firsts, strict=True)
    ]


def _label(record: RunRecord, differing: Iterable[str]) -> str:
    if record.arm is not None:
        return record.arm
    if record.kind == "merge":
        return f"{record.folder.name}: merged at {record.settings['alpha']:g}"
    if record.kind == "policy":
        return record.folder.name
    settings = _distinguishing(record)
    parts = [_setting(name, settings[name]) for name in differing if name in settings]
    return ", ".join([str(settings["mode"]), *filter(None, parts)])


def _differing(all_settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the settings that are not the same everywhere, where they are settings at all."""
    names = dict.fromkeys(name for settings in all_settings for name in settings)
    return [
        name
        for name in names
        if name != "mode"
        and len({json.dumps(s[name], sort_keys=True) for s in all_settings if name in s}) > 1
    ]


def _setting(name: str, value: Any) -> str | None:
    """A setting as one would write it; nothing for what was left as it is."""
    if value is None or value is False:
        return None
    spelled = option_name(name)[2:].replace("-", " ")
    return spelled if value is True else f"{spelled} {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)
