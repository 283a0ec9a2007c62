"""Groups runs that differ only in their seed into arms, and names the arms by what differs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craftcli.compare.runs import RunRecord
from craftcli.config.run_paths import PATHS
from craftcli.config.settings import option_name
from craftcli.config.train import TrainConfig

# The summary's facts about the anchors tell caches apart; their paths do not.
_SAME_ARM = TrainConfig.neutral() | {"seed", "cache"}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way of fine-tuning, with one run per seed."""

    number: int
    """Its number in the table and the plots, from 1; 0 is the teacher."""
    hue: int
    """The number of its colour, from 1; the points of one curve share it. 0 is the teacher's."""
    label: str
    runs: tuple[RunRecord, ...]

    @property
    def seeds(self) -> int:
        """How many runs there are."""
        return len(self.runs)


def group_arms(records: Sequence[RunRecord]) -> list[Arm]:
    """Group runs into arms, in the order of their first runs."""
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
        origin = record.summary and [record.summary.teacher, record.summary.dataset_fingerprint]
        return json.dumps([_distinguishing(record), origin], sort_keys=True)
    # The seed of an interpolated policy is unknown, so each is an arm of its own.
    return str(record.folder)


def _distinguishing(record: RunRecord) -> dict[str, Any]:
    """The settings, and facts about the anchors, that tell arms apart."""
    settings = {n: v for n, v in record.settings.items() if n not in _SAME_ARM}
    # The same policy and data may lie in other folders; the key below has their digests.
    settings |= {n: _file_name(settings[n]) for n in PATHS if settings.get(n)}
    if record.summary and record.summary.anchor_targets:
        settings["anchors"] = record.summary.anchors
        targets = record.summary.anchor_targets
        settings |= {f"cache {name}": value for name, value in targets.items()}
    return settings


def _file_name(value: str | list[str]) -> str | list[str]:
    """The last part of a path, or of each path of a list."""
    if isinstance(value, list):
        return [Path(entry).name for entry in value]
    return Path(value).name


def _labels(firsts: Sequence[RunRecord]) -> list[str]:
    """Name the arms: as the sweep does, or by the mode and the settings that differ."""
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
    """Names of the settings that differ between the arms that have them."""
    names = dict.fromkeys(name for settings in all_settings for name in settings)
    return [
        name
        for name in names
        if name != "mode"
        and len({json.dumps(s[name], sort_keys=True) for s in all_settings if name in s}) > 1
    ]


def _setting(name: str, value: Any) -> str | None:
    """A setting in words, such as `retention every 5`; None for one that is off."""
    if value is None or value is False:
        return None
    spelled = option_name(name)[2:].replace("-", " ")
    return spelled if value is True else f"{spelled} {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)
