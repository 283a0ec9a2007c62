"""The table of settings that a command prints before it starts."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from craftcli.cli.output import Output
from craftcli.config.settings import Settings, option_name


def show_settings(
    title: str,
    settings: Settings,
    origin: Mapping[str, str],
    output: Output,
    *,
    resolved: Mapping[str, Any] | None = None,
) -> None:
    """Show the settings that were chosen or differ from their defaults, and who chose them.

    Settings at their defaults are counted only; with --verbose they are shown as well.

    Args:
        title: the heading.
        settings: the settings.
        origin: who chose each setting, such as flag, file, demo or run.
        output: where to print.
        resolved: values that replace a setting's own, such as the learning rate of the preset.
    """
    resolved = resolved or {}
    values = {**resolved, **settings.to_json(), **resolved}
    values = {n: _shown(value) for n, value in values.items()}
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    rows: dict[str, str] = {}
    for name, value in values.items():
        chosen = origin[name] in ("flag", "file", "demo")
        if chosen or name in resolved or getattr(settings, name) != defaults[name]:
            rows[option_name(name)[2:]] = f"{value}  ({origin[name]})"
        elif output.verbose:
            shown = "not set" if value is None else value
            rows[option_name(name)[2:]] = f"{shown}  ({origin[name]})"
    output.table(title, rows)
    if len(rows) < len(values):
        left = len(values) - len(rows)
        output.say(f" {left} more settings at their defaults; --verbose shows all")


def _shown(value: Any) -> Any:
    """A value as the table has it: paths below the working directory without that directory."""
    if isinstance(value, list):
        return ", ".join(str(_shown(entry)) for entry in value)
    here = f"{Path.cwd()}{os.sep}"
    return value.removeprefix(here) if isinstance(value, str) else value
