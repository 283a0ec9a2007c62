"""How settings work: frozen dataclasses that are validated at once and know who chose each value.

A field is declared with `setting(...)`. Its metadata (help, bounds, effect, panel) is the only
description of it: the command line, the checks and the comparison of runs all read it from there.
"""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.locations import RemotePath, locate

RUN_PANEL = "Run"
"""Heading in `--help` of settings that belong under no other."""


class Effect(StrEnum):
    """What changes when a setting changes."""

    RESULT = "result"
    """The result itself."""
    COMPUTING = "computing"
    """How the same result is computed, such as the device; a resumed run may change it."""
    PLACE = "place"
    """Where the same result goes, such as the output folder; a resumed run keeps it."""
    PERMISSION = "permission"
    """What may run on this machine. Every command asks anew: a run folder cannot allow anything."""


def setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    aliases: tuple[str, ...] = (),
    metavar: str | None = None,
    panel: str = RUN_PANEL,
    effect: Effect = Effect.RESULT,
    positional: bool = False,
) -> Any:
    """Declare a field that the command line offers as an option, or as an argument.

    Args:
        default: its value when nobody chooses one.
        help: one or two sentences for `--help`.
        low: the smallest allowed value.
        high: the largest allowed value.
        above: a bound that the value must exceed.
        aliases: other spellings of the option, such as LeRobot's; files may use them too.
        metavar: the name of the value in `--help`; by default it follows from the type.
        panel: the heading in `--help` under which the option is listed.
        effect: what changes when the setting changes.
        positional: True for an argument instead of an option.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "low": low,
            "high": high,
            "above": above,
            "aliases": aliases,
            "metavar": metavar,
            "panel": panel,
            "effect": effect,
            "positional": positional,
        },
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of the settings of all commands."""

    def __post_init__(self) -> None:
        _refuse(self._convert_names() or [*_out_of_bounds(self), *self.problems()])

    def _convert_names(self) -> list[str]:
        """Replace names of choices, as Python callers write them, by the choices themselves.

        Returns the problems: names that are no choice.
        """
        problems: list[str] = []
        hints = get_type_hints(type(self))
        for name in self.names():
            kind, value = value_type(hints[name]), getattr(self, name)
            if takes_several(hints[name]) and isinstance(value, list | tuple):
                object.__setattr__(self, name, _one_or_several(value))
                continue
            if isinstance(kind, type) and issubclass(kind, Enum) and type(value) is str:
                chosen = _typed(option_name(name), value, hints[name], problems)
                object.__setattr__(self, name, chosen)
        return problems

    def problems(self) -> list[str]:
        """Problems beyond the bounds of single values, such as settings that contradict."""
        return []

    def not_chosen(self, chosen: Collection[str]) -> list[str]:
        """Problems of a user who chose these settings and not others that belong to them."""
        return []

    @classmethod
    def wants_demo(cls, chosen: Mapping[str, Any]) -> bool:
        """Whether the demo's values apply when the user chose these values."""
        return False

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all settings."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def spellings(cls) -> dict[str, str]:
        """The setting of every other spelling, as files write it: epsilon is epsilon_start."""
        return {
            _plain_key(alias): field.name
            for field in dataclasses.fields(cls)
            for alias in field.metadata["aliases"]
            if alias.startswith("--")
        }

    @classmethod
    def neutral(cls) -> frozenset[str]:
        """Names of the settings that do not change the result."""
        return frozenset(
            field.name
            for field in dataclasses.fields(cls)
            if field.metadata["effect"] in (Effect.COMPUTING, Effect.PLACE)
        )

    @classmethod
    def changeable_on_resume(cls) -> frozenset[str]:
        """Names of the settings that a resumed run may change."""
        return frozenset(
            field.name
            for field in dataclasses.fields(cls)
            if field.metadata["effect"] in (Effect.COMPUTING, Effect.PERMISSION)
        )

    @classmethod
    def permissions(cls) -> frozenset[str]:
        """Names of the settings that a run folder cannot choose."""
        return frozenset(
            field.name
            for field in dataclasses.fields(cls)
            if field.metadata["effect"] is Effect.PERMISSION
        )

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {name: _plain(getattr(self, name)) for name in self.names()}


@dataclass(frozen=True, kw_only=True)
class Source[S: Settings]:
    """Settings, and for each of them who chose its value: flag, file, demo or default."""

    settings: S
    origin: Mapping[str, str]
    file: Path | None = None
    """The --config file, if there is one."""

    @property
    def given(self) -> frozenset[str]:
        """Names of the settings that the user chose, on the command line or in a file."""
        return frozenset(name for name, who in self.origin.items() if who in ("flag", "file"))


def resolve[S: Settings](
    cls: type[S],
    *,
    flags: Mapping[str, Any],
    file: Path | None = None,
    demo: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Source[S]:
    """Choose each setting: the command line wins, then the command's own default, file and demo.

    The demo's values apply to the demo only. A setting that nobody chooses keeps its default.

    Args:
        cls: the settings class of the command.
        flags: values from the command line; None means that a flag was not given.
        file: a TOML file with settings.
        demo: values that suit the built-in demo.
        defaults: the command's own defaults.
    """
    written = _read_file(file, cls) if file else {}
    given = {name: _given(value) for name, value in flags.items() if value not in (None, [])}
    for_demo = demo if demo and cls.wants_demo({**written, **given}) else {}
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    # The command's own default beats the file, so that a dry run of three steps stays short.
    ranked = (("demo", for_demo), ("file", written), ("default", defaults or {}), ("flag", given))
    for name in cls.names():
        origin[name] = "default"
        for where, chosen in ranked:
            if name in chosen:
                values[name], origin[name] = chosen[name], where
    settings = cls(**values)
    _refuse(settings.not_chosen({*written, *given}))
    return Source(settings=settings, origin=origin, file=file)


def option_name(name: str) -> str:
    """The spelling of a setting on the command line.

    >>> option_name("from_")  # `from` is a word of Python
    '--from'
    """
    return "--" + name.rstrip("_").replace("_", "-")


def takes_several(hint: Any) -> bool:
    """Whether a setting takes one value or a list of them: `str | tuple[str, ...]`."""
    return any(get_origin(kind) is tuple for kind in get_args(hint))


def value_type(hint: Any) -> Any:
    """The type of a setting's value, without the None that means "not chosen"."""
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint)


def read_settings(
    cls: type[Settings], written: Mapping[str, Any], *, source: str
) -> dict[str, Any]:
    """Read values of settings from a file and convert each to the type of its setting.

    Raises:
        CraftError: a name is unknown or a value has the wrong type; all problems in one message.
    """
    spellings = cls.spellings()
    names = {key: spellings.get(_plain_key(key), _plain_key(key)) for key in written}
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
    problems = [
        f"{' and '.join(same)} are the same setting."
        for name in dict.fromkeys(names.values())
        if len(same := [key for key in written if names[key] == name]) > 1
    ]
    values = {name: _typed(key, written[key], types[name], problems) for key, name in names.items()}
    if problems:
        raise CraftError(
            f"Some settings in {source} cannot be used.",
            why=" ".join(problems),
            fix="correct them in the file; --help lists the settings.",
            exit_code=EXIT_USAGE,
        )
    return values


def read_saved_settings(
    cls: type[Settings], saved: Mapping[str, Any], *, source: str
) -> dict[str, Any]:
    """Read the settings that a run saved, without permissions: those are asked for again."""
    values = read_settings(cls, saved, source=source)
    return {name: value for name, value in values.items() if name not in cls.permissions()}


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
            problems.append(f"{option_name(field.name)} is {value}, below {_bound(low)}")
        elif above is not None and value <= above:
            problems.append(f"{option_name(field.name)} is {value}, not above {_bound(above)}")
        elif high is not None and value > high:
            problems.append(f"{option_name(field.name)} is {value}, above {_bound(high)}")
    return problems


def _bound(value: float) -> str:
    """All digits of an integer; a large one must not be rounded."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _refuse(problems: list[str]) -> None:
    if problems:
        raise CraftError(
            "These settings cannot be used.",
            why=" ".join(f"{problem}." for problem in problems),
            fix="correct them on the command line or in the --config file.",
            exit_code=EXIT_USAGE,
        )


def _plain_key(key: str) -> str:
    """A spelling of the command line or of a file as the name of a field would be written."""
    return key.removeprefix("--").replace("-", "_")


def _closest(key: str, names: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), names, n=1)
    return f" Did you mean {near[0]} for {key}?" if near else ""


def _typed(key: str, value: Any, hint: Any, problems: list[str]) -> Any:
    """Convert a value to the type of its setting; a wrong type is added to `problems`."""
    kind = value_type(hint)
    if takes_several(hint) and isinstance(value, list | tuple):
        if value and all(isinstance(entry, kind) for entry in value):
            return _one_or_several(value)
        problems.append(f"{key} is {value!r}, not a list of type {kind.__name__}.")
        return None
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


def _given(value: Any) -> Any:
    """A value from the command line; an option that may be repeated gives a list."""
    return _one_or_several(value) if isinstance(value, list) else value


def _one_or_several(values: Sequence[Any]) -> Any:
    """A list with a single value is that value, so that both are the same setting."""
    return values[0] if len(values) == 1 else tuple(values)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path | RemotePath) else value
