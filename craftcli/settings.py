"""How settings work: frozen, validated at once, each knowing where its value came from."""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.locations import RemotePath, locate


def setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    aliases: tuple[str, ...] = (),
    panel: str = "Run",
) -> Any:
    """A field that the command line offers as an option; `low` and `high` are still allowed."""
    bounds = {"low": low, "high": high, "above": above}
    return dataclasses.field(
        default=default,
        metadata={"help": help, "aliases": aliases, "panel": panel, **bounds},
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the commands' settings."""

    def __post_init__(self) -> None:
        problems = self._take_names() or [*_out_of_bounds(self), *self.problems()]
        if problems:
            raise CraftError(
                "These settings cannot be used.",
                why=" ".join(f"{problem}." for problem in problems),
                fix="correct them on the command line or in the --config file.",
                exit_code=EXIT_USAGE,
            )

    def _take_names(self) -> list[str]:
        """Take a choice by its name too, as callers from Python write it; what is no name."""
        problems: list[str] = []
        for name, hint in get_type_hints(type(self)).items():
            kind = next((k for k in get_args(hint) if k is not type(None)), hint)
            value = getattr(self, name)
            named = isinstance(kind, type) and issubclass(kind, Enum) and type(value) is str
            if named:
                chosen = _typed(option_name(name), value, hint, problems)
                object.__setattr__(self, name, chosen)
        return problems

    def problems(self) -> list[str]:
        """What is wrong beyond the bounds of single values."""
        return []

    @classmethod
    def wants_demo(cls, chosen: Mapping[str, Any]) -> bool:
        """Whether the demo's values apply to settings of which these were chosen."""
        return False

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {name: _plain(getattr(self, name)) for name in self.names()}


@dataclass(frozen=True, kw_only=True)
class Source[S: Settings]:
    """Settings and, for each of them, who decided it: flag, file, demo or default."""

    settings: S
    origin: Mapping[str, str]

    @property
    def given(self) -> frozenset[str]:
        """The settings that the user decided."""
        return frozenset(name for name, who in self.origin.items() if who in ("flag", "file"))


def resolve[S: Settings](
    cls: type[S],
    *,
    flags: Mapping[str, Any],
    file: Path | None = None,
    demo: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Source[S]:
    """Settings from the command line, else the command's own, else the file's, else the demo's.

    What nobody decided keeps the default of its field.
    """
    written = _read_file(file, cls) if file else {}
    given = {name: value for name, value in flags.items() if value is not None}
    for_demo = demo if demo and cls.wants_demo({**written, **given}) else {}
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    # A command's own values beat the file: a rehearsal of three steps stays one.
    ranked = (("demo", for_demo), ("file", written), ("default", defaults or {}), ("flag", given))
    for name in cls.names():
        origin[name] = "default"
        for where, chosen in ranked:
            if name in chosen:
                values[name], origin[name] = chosen[name], where
    return Source(settings=cls(**values), origin=origin)


def _out_of_bounds(settings: Settings) -> list[str]:
    problems = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        low, high, above = (field.metadata[name] for name in ("low", "high", "above"))
        if not math.isfinite(value):
            problems.append(f"{option_name(field.name)} is {value}")
        elif low is not None and value < low:
            problems.append(f"{option_name(field.name)} is {value}, below {low:g}")
        elif above is not None and value <= above:
            problems.append(f"{option_name(field.name)} is {value}, not above {above:g}")
        elif high is not None and value > high:
            problems.append(f"{option_name(field.name)} is {value}, above {high:g}")
    return problems


def option_name(name: str) -> str:
    """How the command line spells a setting."""
    return "--" + name.replace("_", "-")


def _read_file(file: Path, cls: type[Settings]) -> dict[str, Any]:
    try:
        written = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CraftError(
            f"Cannot read the configuration {file}.",
            why=f"{error}.",
            fix="give --config a TOML file.",
            exit_code=EXIT_USAGE,
        ) from error
    return read_settings(cls, written, source=str(file))


def read_settings(
    cls: type[Settings], written: Mapping[str, Any], *, source: str
) -> dict[str, Any]:
    """Values of settings from a file, each of the type of its setting."""
    names = {key: key.replace("-", "_") for key in written}
    unknown = [key for key, name in names.items() if name not in cls.names()]
    if unknown:
        hints = [_closest(key, cls.names()) for key in unknown]
        raise CraftError(
            f"Unknown settings in {source}: {', '.join(unknown)}.",
            why="this command has no such setting." + "".join(hints),
            fix="remove or correct them; --help lists the settings.",
            exit_code=EXIT_USAGE,
        )
    types = get_type_hints(cls)
    problems: list[str] = []
    values = {name: _typed(key, written[key], types[name], problems) for key, name in names.items()}
    if problems:
        raise CraftError(
            f"Some settings in {source} cannot be used.",
            why=" ".join(problems),
            fix="correct them in the file; --help lists the settings.",
            exit_code=EXIT_USAGE,
        )
    return values


def _closest(key: str, names: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), names, n=1)
    return f" Did you mean {near[0]} for {key}?" if near else ""


def _typed(key: str, value: Any, hint: Any, problems: list[str]) -> Any:
    """The value as the type of its setting, or a problem: a file cannot smuggle in another."""
    kind = next((k for k in get_args(hint) if k is not type(None)), hint)
    if isinstance(value, str) and RemotePath in get_args(hint):
        return locate(value)
    if value is None and type(None) in get_args(hint):
        return None
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and issubclass(kind, str | Path):
        try:
            return kind(value)
        except ValueError:
            choices = f"one of {', '.join(kind)}"
    else:
        choices = f"of type {kind.__name__}"
    problems.append(f"{key} is {value!r}, not {choices}.")
    return None


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path | RemotePath) else value
