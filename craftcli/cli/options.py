"""Commands as Typer knows them: options from a settings class, and errors as messages."""

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from craftcli.cli.help import Command, examples_epilog
from craftcli.cli.os_errors import explain, is_full_disk
from craftcli.cli.output import Output
from craftcli.config.settings import (
    Settings,
    Source,
    option_name,
    resolve,
    takes_several,
    value_type,
)
from craftcli.errors import EXIT_ERROR, EXIT_INTERRUPTED, CraftError
from craftcli.locations import Location, RemotePath, locate

MAIN_PANEL = "Main options"

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file with settings. Options override it."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout, all else on stderr.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show all settings, also those at their defaults.")
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks, and the logs of other libraries.")
]

_METAVARS: Mapping[type, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def add_command(
    app: typer.Typer,
    name: str,
    body: Callable[..., None],
    *,
    help: str,
    examples: tuple[str, ...],
) -> None:
    """Register a function as a command; its parameters become the options."""
    app.command(name, cls=Command, help=help, epilog=examples_epilog(*examples))(body)


def add_settings_command[S: Settings](
    app: typer.Typer,
    name: str,
    cls: type[S],
    body: Callable[[Source[S], Output], None],
    *,
    help: str,
    examples: tuple[str, ...],
    main: tuple[str, ...] = (),
    omit: tuple[str, ...] = (),
    demo: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    config_file: bool = True,
) -> None:
    """Register a command that has every field of a settings class as an option.

    Args:
        app: where the command is added.
        name: name of the command.
        cls: the settings class.
        body: runs the command; it gets the settings and where to print.
        help: description for `--help`.
        examples: command lines for `--help`.
        main: the settings that most users need; `--help` shows them first, in this order.
        omit: settings that this command does not offer.
        demo: values that suit the built-in demo.
        defaults: the command's own defaults.
        config_file: whether the command reads a --config file and shows its settings.
    """

    def run(as_json: bool, debug: bool, **flags: Any) -> None:
        file, verbose = flags.pop("config", None), flags.pop("verbose", False)

        def act(output: Output) -> None:
            body(resolve(cls, flags=flags, file=file, demo=demo, defaults=defaults), output)

        guarded(act, as_json=as_json, debug=debug, verbose=verbose)

    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in omit}
    panels = dict.fromkeys((name for name in main if name in fields), MAIN_PANEL)
    panels |= {n: f.metadata["panel"] for n, f in fields.items() if n not in panels}
    hints = get_type_hints(cls)
    parameters = [
        _option(fields[name], hints[name], defaults or {}, panel=panel, negatable=config_file)
        for name, panel in panels.items()
    ]
    if config_file:
        parameters.append(_parameter("config", ConfigFile, None))
        parameters.append(_parameter("verbose", Verbose, False))
    parameters.append(_parameter("as_json", AsJson, False))
    parameters.append(_parameter("debug", Debug, False))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    add_command(app, name, run, help=help, examples=examples)


def guarded(
    act: Callable[[Output], None], *, as_json: bool, debug: bool, verbose: bool = False
) -> None:
    """Run a command's body; turn errors into a message and an exit code, not a traceback."""
    output = Output(as_json=as_json, debug=debug, verbose=verbose)
    try:
        act(output)
    except CraftError as error:
        if debug:
            traceback.print_exc()
        full = explain(error) if is_full_disk(error.__cause__) else None
        output.error(full or error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        output.warn("interrupted.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        output.error(
            explain(error)
            or CraftError(
                "Something went wrong that craft has no explanation for.",
                why=f"{type(error).__name__}: {error}",
                fix="run the command again with --debug and report what it prints.",
            )
        )
        raise typer.Exit(EXIT_ERROR) from None


def warn_of_unused(found: list[str], output: Output) -> None:
    """Print one warning for all settings that the user chose and that have no effect."""
    if found:
        output.warn(f"these settings have no effect here: {'; '.join(found)}.")


def parse_location(text: str) -> Location:
    """Read a folder or a URL from the command line."""
    try:
        return locate(text)
    except CraftError as error:
        raise typer.BadParameter(f"{error.what} Why: {error.why}") from error


def _option(
    field: dataclasses.Field[Any],
    hint: Any,
    defaults: Mapping[str, Any],
    *,
    panel: str,
    negatable: bool,
) -> inspect.Parameter:
    """A setting as an option; `negatable` flags have a --no-... that overrides a file."""
    about = field.metadata
    default = defaults.get(field.name, field.default)
    kind = value_type(hint)
    is_choice = issubclass(kind, Enum)
    declared: dict[str, Any] = {
        "help": about["help"] + (f" One of {', '.join(kind)}." if is_choice else ""),
        "show_default": False if default is None or kind is bool else str(default),
    }
    if kind is not bool:
        declared["metavar"] = about["metavar"] or _METAVARS.get(kind, "NAME")
    if RemotePath in get_args(hint):
        # Typer would make a Path of a URL, which loses a slash.
        declared["parser"] = parse_location
    if about["positional"]:
        parameter: Any = typer.Argument(**declared)
    else:
        flag = option_name(field.name)
        if kind is bool and negatable:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        parameter = typer.Option(flag, *about["aliases"], rich_help_panel=panel, **declared)
    # None means that the flag was not given, so that a file or the demo may choose.
    annotation = list[kind] if takes_several(hint) else kind  # type: ignore[valid-type]
    return _parameter(field.name, Annotated[annotation | None, parameter], None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
