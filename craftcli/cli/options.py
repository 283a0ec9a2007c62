"""Commands whose options are the fields of a settings class."""

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from craftcli.cli.output import Output
from craftcli.errors import EXIT_ERROR, EXIT_INTERRUPTED, CraftError
from craftcli.locations import Location, RemotePath, locate
from craftcli.settings import Settings, Source, option_name, resolve

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with settings; flags win over it.", metavar="FILE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and libraries' own logs.")]


def settings_command[S: Settings](
    app: typer.Typer,
    name: str,
    cls: type[S],
    *,
    help: str,
    examples: tuple[str, ...],
    demo: Mapping[str, Any] | None = None,
    omit: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[Callable[[Source[S], Output], None]], Callable[[Source[S], Output], None]]:
    """Register a command that takes every field of `cls` as an option and gets them resolved."""

    def register(body: Callable[[Source[S], Output], None]) -> Callable[[Source[S], Output], None]:
        def run(config: Path | None, as_json: bool, debug: bool, **flags: Any) -> None:
            def act(output: Output) -> None:
                body(resolve(cls, flags=flags, file=config, demo=demo, defaults=defaults), output)

            guarded(act, as_json=as_json, debug=debug)

        parameters = [
            _option(field, get_type_hints(cls)[field.name], defaults or {})
            for field in dataclasses.fields(cls)
            if field.name not in omit
        ]
        parameters += [
            _parameter("config", ConfigFile, None),
            _parameter("as_json", AsJson, False),
            _parameter("debug", Debug, False),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, help=help, epilog=epilog(*examples))(run)
        return body

    return register


def guarded(act: Callable[[Output], None], *, as_json: bool, debug: bool) -> None:
    """Run a command's body; problems become a message and an exit code, not a traceback."""
    output = Output(as_json=as_json, debug=debug)
    try:
        act(output)
    except CraftError as error:
        if debug:
            traceback.print_exc()
        output.error(error)
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
            CraftError(
                "Something went wrong that craft has no explanation for.",
                why=f"{type(error).__name__}: {error}",
                fix="run the command again with --debug and report what it prints.",
            )
        )
        raise typer.Exit(EXIT_ERROR) from None


def warn_of_unused(found: list[str], output: Output) -> None:
    """One warning for all settings that were given for nothing."""
    if found:
        output.warn(f"these settings change nothing here: {'; '.join(found)}.")


def parse_location(text: str) -> Location:
    """A folder or a URL from the command line."""
    try:
        return locate(text)
    except CraftError as error:
        raise typer.BadParameter(f"{error.what} Why: {error.why}") from error


def epilog(*examples: str) -> str:
    """Examples as the end of a command's help."""
    return "Examples:\n\n" + "\n\n".join(f"  {example}" for example in examples)


def _option(field: Any, hint: Any, defaults: Mapping[str, Any]) -> inspect.Parameter:
    default = defaults.get(field.name, field.default)
    flag = option_name(field.name)
    kind = next((k for k in get_args(hint) if k is not type(None)), hint)
    spelled = f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag
    if isinstance(default, bool):
        shown: str | bool = f"--no-{flag.removeprefix('--')}" if not default else flag
    else:
        shown = default.value if isinstance(default, Enum) else str(default)
    # Typer would make a Path of a URL, and lose a slash.
    remote: dict[str, Any] = {"parser": parse_location, "metavar": "PATH"}
    option = typer.Option(
        spelled,
        *field.metadata["aliases"],
        **(remote if RemotePath in get_args(hint) else {}),
        help=field.metadata["help"],
        show_default=False if default is None else shown,
        rich_help_panel=field.metadata["panel"],
    )
    # None says that the flag was not given, so that a file or the demo may decide.
    return _parameter(field.name, Annotated[kind | None, option], None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
