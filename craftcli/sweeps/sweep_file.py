"""The TOML file of a sweep: its format, its checks, and the arms it describes.

output = "sweep"                  folder of all results, relative to the file
title = "Demo"                    heading of the report
seeds = [0, 1, 2]                 seeds of the runs
old = ["metaworld:reach-v3"]      environments that show the old skill and the new one, for
new = ["metaworld:door-open-v3"]    those that craft cannot tell
[cache]                           settings of craft cache build for all arms
[train]                           settings of craft train for all arms
[eval]                            settings of craft eval
[held_out]                        settings of one more cache, on which drift is measured; the
                                    others are as in [cache]. Its frames are not in the first
                                    arm's cache, but may be in that of another arm
[[arm]]
name = "hidden"
train = { mode = "hidden" }       overrides [train]
cache = { samples = 64 }          overrides [cache]; equal caches are built once
seeds = [0]                       replaces the seeds of the sweep
grid = { lambda_init = [1, 10] }  one arm for every combination of these training settings
[[arm]]
name = "half"                     interpolates the runs of another arm with their teacher
merge = { of = "none", alpha = 0.5, groups = { vision_tower = 0 } }
"""

import difflib
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from craftcli.errors import EXIT_USAGE, CraftError

_TOP = ("output", "title", "seeds", "old", "new", "cache", "train", "eval", "held_out", "arm")
_ARM = ("name", "train", "cache", "seeds", "grid", "merge")
_MERGE = ("of", "alpha", "groups")


@dataclass(frozen=True, kw_only=True)
class InterpolationSpec:
    """Interpolates the weights of another arm's runs with their teacher's, as craft merge does."""

    of: str
    """Name of the other arm."""
    alpha: float
    groups: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ArmSpec:
    """One way of fine-tuning, or an interpolation of another arm."""

    name: str
    train: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] | None = None
    """None for the seeds of the sweep."""
    interpolation: InterpolationSpec | None = None
    curve: str | None = None
    """The entry of the file that it is a point of, if its grid varies one setting."""


@dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """Settings of `craft eval`; None is the default of the command."""

    env: tuple[str, ...] = ()
    """If empty: the demo, or else the environments of the old and the new skill."""
    episodes: int | None = None
    seed: int | None = None
    max_steps: int | None = None
    batch_size: int | None = None
    workers: int | None = None

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """From the table [eval]."""
        return cls(**{**table, "env": tuple(table.get("env", ()))})

    @property
    def amounts(self) -> dict[str, int]:
        """The chosen settings, except the environments."""
        chosen = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "env")
        return {name: value for name, value in chosen if value is not None}


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """A sweep: its arms, and the settings that they share."""

    output: Path
    arms: tuple[ArmSpec, ...]
    seeds: tuple[int, ...] = (0,)
    title: str = "Comparison"
    old: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    cache: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    eval: EvalSpec = EvalSpec()
    held_out: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise _refused("the sweep", problems)

    @classmethod
    def from_dict(
        cls, document: Mapping[str, Any], *, folder: Path, source: str = "the sweep"
    ) -> Self:
        """From the parsed file; `folder` is where the file is.

        Raises:
            CraftError: the document is not a sweep; the error lists all problems.
        """
        problems = _shape_problems(document)
        if problems:
            raise _refused(source, problems)
        arms = [arm for entry in document["arm"] for arm in _arms(entry)]
        chosen: dict[str, Any] = {
            name: tuple(document[name]) for name in ("seeds", "old", "new") if name in document
        }
        chosen |= {
            name: document[name]
            for name in ("title", "cache", "train", "held_out")
            if name in document
        }
        return cls(
            output=folder / document.get("output", "sweep"),
            arms=tuple(arms),
            eval=EvalSpec.from_dict(document.get("eval", {})),
            **chosen,
        )


def read_sweep(file: Path) -> SweepSpec:
    """Read the file of a sweep.

    Raises:
        CraftError: it cannot be read, or is not a sweep; the error lists all problems.
    """
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CraftError(
            f"Cannot read the sweep {file}.",
            why=f"{error}.",
            fix="give --sweep a TOML file; examples/pages/compare.md shows one.",
            exit_code=EXIT_USAGE,
        ) from error
    return SweepSpec.from_dict(document, folder=file.parent, source=str(file))


def _arms(entry: Mapping[str, Any]) -> list[ArmSpec]:
    """The arms of one entry: one, or one for every point of its grid."""
    interpolation = entry.get("merge")
    common: dict[str, Any] = {
        "cache": entry.get("cache", {}),
        "seeds": tuple(entry["seeds"]) if "seeds" in entry else None,
        "interpolation": interpolation and InterpolationSpec(**interpolation),
        "curve": entry["name"] if len(entry.get("grid", ())) == 1 else None,
    }
    grid: Mapping[str, Sequence[Any]] = entry.get("grid", {})
    arms = []
    for point in itertools.product(*grid.values()):
        chosen = dict(zip(grid, point, strict=True))
        suffix = "".join(f", {_in_words(name)} {_number(v)}" for name, v in chosen.items())
        train = {**entry.get("train", {}), **chosen}
        arms.append(ArmSpec(name=entry["name"] + suffix, train=train, **common))
    return arms


def _in_words(name: str) -> str:
    return name.replace("_", " ").replace("-", " ")


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shape_problems(document: Mapping[str, Any]) -> list[str]:
    """Problems of the document's structure: unknown keys, wrong types, missing names."""
    problems = _unknown("", document, _TOP)
    tables = ("cache", "train", "eval", "held_out")
    problems += [f"{n} is not a table" for n in tables if not isinstance(document.get(n, {}), dict)]
    if isinstance(table := document.get("eval", {}), dict):
        problems += _unknown("[eval]: ", table, [f.name for f in fields(EvalSpec)])
    problems += [
        f"{name} is not a list"
        for name in ("seeds", "old", "new")
        if not isinstance(document.get(name, []), list)
    ]
    arms = document.get("arm", [])
    if not arms or not isinstance(arms, list) or not all(isinstance(arm, dict) for arm in arms):
        return [*problems, "it has no [[arm]]"]
    for number, arm in enumerate(arms, 1):
        where = f"arm {arm.get('name', number)}: "
        if not isinstance(arm.get("name"), str) or not arm["name"].strip():
            problems.append(f"{where}it has no name")
        problems += _unknown(where, arm, _ARM)
        merge = arm.get("merge")
        if merge is not None:
            problems += _unknown(where, merge, _MERGE)
            problems += [f"{where}merge lacks {n}" for n in ("of", "alpha") if n not in merge]
        grid = arm.get("grid", {})
        if not all(isinstance(values, list) and values for values in grid.values()):
            problems.append(f"{where}grid needs a list of values for every setting")
    return problems


def _problems(spec: SweepSpec) -> list[str]:
    """Problems between the parts: arms that clash, seeds, interpolations of unknown arms."""
    names = [arm.name for arm in spec.arms]
    problems = [
        f"two arms are called {name!r}" for name in sorted(set(names)) if names.count(name) > 1
    ]
    for seeds in [spec.seeds, *(arm.seeds for arm in spec.arms if arm.seeds is not None)]:
        if not seeds or len(set(seeds)) < len(seeds) or not all(type(s) is int for s in seeds):
            problems.append(f"seeds are {list(seeds)}, not a list of different whole numbers")
    trained = {arm.name for arm in spec.arms if arm.interpolation is None}
    for arm in spec.arms:
        if arm.interpolation and arm.interpolation.of not in trained:
            other = arm.interpolation.of
            problems.append(f"arm {arm.name} interpolates {other!r}, which no arm trains")
        if arm.interpolation and (arm.train or arm.cache):
            problems.append(f"arm {arm.name} has a merge, so that train and cache do nothing")
        taken = [name for name in ("seed", "output", "resume") if name in arm.train]
        if taken:
            problems.append(f"arm {arm.name}: {', '.join(taken)} is set by the sweep")
        if "policy" in arm.train:
            problems.append(f"arm {arm.name} has a policy; a sweep has one policy, in [train]")
    return problems


def _unknown(where: str, table: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    problems = []
    for key in table:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            problems.append(
                f"{where}unknown key {key}" + (f" (did you mean {near[0]}?)" if near else "")
            )
    return problems


def _refused(source: str, problems: list[str]) -> CraftError:
    return CraftError(
        f"{source[0].upper()}{source[1:]} is not valid.",
        why=" ".join(f"{problem}." for problem in problems),
        fix="correct it; examples/pages/compare.md shows one.",
        exit_code=EXIT_USAGE,
    )
