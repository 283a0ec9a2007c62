"""The layout of `craft COMMAND --help`: one line for each option name, readable from 60 columns on.

Typer's own layout gives aliases, `--no-...` spellings and types a column each, and cuts off option
names on a terminal of 80 columns. Here an option shows its main name and a short one. All other
spellings are listed once, at the end. On a narrow terminal a help text stands below the name.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup

from craftcli.cli.lerobot_options import refuse_lerobot_options
from craftcli.config.settings import RUN_PANEL

_ARGUMENTS = "Arguments"
_COMMANDS = "Commands"
_OPTIONS = "Options"

_NAMES = "bold cyan"
_MIN_TEXT = 32
"""Columns that help texts need; with fewer beside the names, they go below them."""
_FRAME = 6
"""Columns of a panel that hold no text: its frame, and the space between its columns."""


class Command(TyperCommand):
    """A command of craft."""

    # Typer hands in objects of a library that it does not export, hence Any.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; options of LeRobot that craft lacks are explained."""
        if not ctx.resilient_parsing:  # as for shell completion, which only looks
            refuse_lerobot_options(self.name, args, _names_and_flags(self.get_params(ctx)))
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print usage, description, options by panel, other spellings and examples."""
        parameters = [p for p in self.get_params(ctx) if not getattr(p, "hidden", False)]
        with _page(self, ctx) as console:
            _print_panels([_entry(parameter) for parameter in parameters], console)
            if spellings := _other_spellings(parameters):
                console.print(Padding(Text(spellings, style="dim"), (0, 1)))


class Group(TyperGroup):
    """A group of commands: `craft` itself and `craft cache`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print usage, description, commands, options and examples."""
        entries = [_entry(parameter) for parameter in self.get_params(ctx)]
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            summary = _first_sentence((command.help or "") if command else "")
            entries.append(_Entry(panel=_COMMANDS, names=name, help=summary, default=""))
        with _page(self, ctx) as console:
            for title in _titles(entries):
                _print_panels([entry for entry in entries if entry.panel == title], console)


def examples_epilog(*examples: str) -> str:
    """Examples as the end of a command's help."""
    return "Examples:\n\n" + "\n\n".join(f"  {example}" for example in examples)


@contextmanager
def _page(command: TyperCommand | TyperGroup, ctx: Any) -> Iterator[Console]:
    """Print the start of a page of help, and its examples at the end."""
    console = Console(highlight=False)
    # Typer puts required arguments in braces, which elsewhere mean a choice.
    usage = command.get_usage(ctx).replace("{", "").replace("}", "")
    console.print(Padding(Text(usage, style="bold"), (1, 1)))
    console.print(Padding(Text(cleandoc(command.help or "")), (0, 1, 1, 1)))
    yield console
    examples = (command.epilog or "").replace("\n\n", "\n")
    # Not wrapped, so that examples can be copied from a narrow terminal.
    console.print(f"\n{examples}", markup=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One option or argument as `--help` shows it."""

    panel: str
    names: str
    """Its short and main name, and the name of its value."""
    help: str
    default: str

    @property
    def text(self) -> Text:
        """What stands beside its names, or below them."""
        return Text.assemble(self.help, (self.default, "dim"))


def _entry(parameter: Any) -> _Entry:
    if isinstance(parameter, TyperArgument):
        names = f"{parameter.metavar}{' ...' if parameter.nargs != 1 else ''}"
    else:
        short = [name for name in parameter.opts if not name.startswith("--")]
        value = "" if parameter.is_flag else f" {parameter.metavar}"
        names = ", ".join([*short, _main_name(parameter)]) + value
    panel = _ARGUMENTS if isinstance(parameter, TyperArgument) else _OPTIONS
    return _Entry(
        panel=getattr(parameter, "rich_help_panel", None) or panel,
        names=names,
        help=getattr(parameter, "help", None) or "",
        default=_default(parameter),
    )


def _names_and_flags(parameters: Iterable[Any]) -> dict[str, bool]:
    """Every spelling of every option, and whether it is a flag, which takes no value."""
    return {
        name: bool(parameter.is_flag)
        for parameter in parameters
        if not isinstance(parameter, TyperArgument)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def _main_name(option: Any) -> str:
    """The name of an option; of a flag that is set by default, the name that unsets it."""
    names = option.secondary_opts if option.default is True else option.opts
    return str(next(name for name in names if name.startswith("--")))


def _default(parameter: Any) -> str:
    if parameter.required:
        return " [required]"
    shown, value = getattr(parameter, "show_default", False), parameter.default
    if isinstance(shown, str):
        return f" [default: {shown}]"
    if not shown or value is None or isinstance(value, bool) or callable(value):
        return ""
    return f" [default: {value}]"


def _titles(entries: Iterable[_Entry]) -> list[str]:
    """Panels in the order of their first entry: arguments first, general options last."""
    titles = list(dict.fromkeys(entry.panel for entry in entries))
    order = {_ARGUMENTS: -1, RUN_PANEL: 1, _OPTIONS: 2}
    return sorted(titles, key=lambda title: order.get(title, 0))


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _print_panels(entries: Sequence[_Entry], console: Console) -> None:
    """Print a panel for each title, with the same columns in all of them."""
    width = max(len(entry.names) for entry in entries)
    longest_word = max(len(word) for entry in entries for word in entry.text.plain.split())
    beside = console.width - width - _FRAME >= max(_MIN_TEXT, longest_word)
    for title in _titles(entries):
        own = [entry for entry in entries if entry.panel == title]
        table = _two_columns(own, width) if beside else _one_column(own)
        console.print(Panel(table, title=title, title_align="left", border_style="dim"))


def _two_columns(entries: Iterable[_Entry], width: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style=_NAMES, width=width, overflow="fold")
    table.add_column(overflow="fold")
    for entry in entries:
        table.add_row(Text(entry.names), entry.text)
    return table


def _one_column(entries: Iterable[_Entry]) -> Table:
    table = Table.grid()
    for entry in entries:
        table.add_row(Text(entry.names, style=_NAMES))
        table.add_row(Padding(entry.text, (0, 0, 0, 4)))
    return table


def _other_spellings(parameters: Iterable[Any]) -> str:
    """One sentence with the aliases of all options, and one about `--no-...`."""
    options = [p for p in parameters if not isinstance(p, TyperArgument)]
    aliases = [
        f"{name} ({_main_name(option)})"
        for option in options
        for name in option.opts
        if name.startswith("--") and not option.secondary_opts and name != _main_name(option)
    ]
    sentences = []
    if aliases:
        sentences.append(f"Other spellings work too: {', '.join(aliases)}.")
    if any("--config" in option.opts for option in options):
        sentences.append("--no-NAME unsets a flag that the --config file sets.")
    return "\n".join(sentences)
