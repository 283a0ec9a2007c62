"""The only module that prints: results go to stdout, everything else to stderr.

Much of the text comes from files of others. `readable` makes it harmless to a terminal.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from craftcli.cli.encoding import shows_all_letters
from craftcli.cli.plain_progress import PlainProgress
from craftcli.errors import CraftError

_LONGEST = 2000
"""Most characters of one text; more would bury what craft says itself."""
_UNSAFE = re.compile(
    # Control characters but tab and newline, marks that reverse text, halves of characters.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class Output:
    """Prints for a command. With `--json`, stdout gets a single JSON document and nothing else."""

    def __init__(
        self,
        *,
        as_json: bool = False,
        debug: bool = False,
        verbose: bool = False,
        silent: bool = False,
    ) -> None:
        self.as_json = as_json and not silent
        self.debug = debug
        self.verbose = verbose
        # Without highlighting: it would colour numbers in lines that other programs read.
        self._data = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=silent)
        self._notes = Console(file=sys.stderr, highlight=False, soft_wrap=True, quiet=silent)
        self._bar_running = False

    def for_first(self, *, is_first: bool) -> "Output":
        """This output for the first of several processes; a silent one for the others."""
        return self if is_first else Output(debug=self.debug, silent=True)

    @property
    def _result(self) -> Console:
        # A progress bar stays below the lines of its own console only.
        below_bar = self._bar_running and self._data.is_terminal
        return self._notes if self.as_json or below_bar else self._data

    def say(self, text: str = "") -> None:
        """Print a line of the command's result."""
        self._result.print(_shown(text))

    def table(self, title: str, rows: Mapping[str, Any]) -> None:
        """Print names and values in two aligned columns."""
        table = Table(title=_shown(title), title_justify="left", show_header=False, box=None)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(_shown(name), _shown(str(value)))
        self._result.print(table)

    def grid(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows under titles; the first two columns hold words, the others figures.

        On a narrow terminal the figures are split into several tables.
        """
        console = self._result
        blocks: list[list[int]] = [[]]
        for column in range(2, len(titles)):
            wider = [*blocks[-1], column]
            needed = _width(_grid(titles, rows, wider), console)
            if blocks[-1] and console.is_terminal and needed > console.width:
                blocks.append([column])
            else:
                blocks[-1] = wider
        for block in blocks:
            table = _grid(titles, rows, block)
            if not console.is_terminal:
                # A file has no width, and rich would assume 80 columns.
                wide = _width(table, console)
                console = Console(
                    file=console.file, highlight=False, width=wide, quiet=console.quiet
                )
            console.print(table)

    def json(self, document: Any) -> None:
        """Print the command's result as JSON, with --json only."""
        if self.as_json:
            escape_letters = not shows_all_letters(sys.stdout.encoding)
            text = json.dumps(document, indent=2, ensure_ascii=escape_letters)
            # JSON itself escapes only some control characters.
            sys.stdout.write(_UNSAFE.sub(lambda m: f"\\u{ord(m[0]):04x}", text) + "\n")

    def note(self, text: str) -> None:
        """Print information that is not part of the result."""
        self._notes.print(_shown(text, below="  "), style="dim")

    def warn(self, text: str) -> None:
        """Print a warning that the user may want to act on."""
        self._notes.print(f"[yellow]Warning:[/yellow] {_shown(text, below='  ')}")

    def error(self, error: CraftError) -> None:
        """Print an error: what happened, why, and how to fix it."""
        what, why, fix = (_shown(text, below="    ") for text in (error.what, error.why, error.fix))
        self._notes.print(f"[bold red]Error:[/bold red] {what}")
        self._notes.print(f"  [bold]Why:[/bold] {why}")
        self._notes.print(f"  [bold]Fix:[/bold] {fix}")

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Show what is going on while something takes long."""
        if not self._notes.is_terminal:
            self.note(text)
            yield
            return
        with self._notes.status(_shown(text)):
            yield

    def next(self, *commands: str) -> None:
        """Print the command that usually follows; --json is read by programs, which know."""
        if not self.as_json:
            self.note(f"Next: {', then '.join(commands)}")

    @contextmanager
    def progress(self, total: int, unit: str, name: str) -> Iterator[Callable[[int], None]]:
        """Show a named bar with rate and remaining time; yields how to advance it.

        Where there is no terminal, a line is printed every ten seconds instead.
        """
        if not self._notes.is_terminal:
            yield PlainProgress(name, total, unit, say=self.note).advance
            return
        columns: tuple[ProgressColumn, ...] = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            _Rate(unit),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._notes) as progress:
            task = progress.add_task(escape(name), total=total)
            self._bar_running = True
            try:
                yield lambda count: progress.advance(task, count)
            finally:
                self._bar_running = False


def readable(text: str) -> str:
    """Text without control characters, and not too long.

    A file could otherwise clear the screen, colour or hide what follows, or bury it.

    >>> print(readable("a\\x1b[2Jb"))
    a\\x1b[2Jb
    """
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        left_out = f" ... ({len(text) - 2 * half:,} characters left out) ... "
        text = text[:half] + left_out + text[-half:]
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def _shown(text: str, *, below: str = "") -> str:
    """Readable text without markup; `below` indents its further lines under the first."""
    return escape(readable(text).replace("\n", "\n" + below))


def _grid(titles: Sequence[str], rows: Sequence[Sequence[str]], figures: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (0, 1):
        table.add_column(_shown(titles[column]))
    for column in figures:
        table.add_column(_shown(titles[column]), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(_shown(row[column]) for column in (0, 1, *figures)))
    return table


def _width(table: Table, console: Console) -> int:
    """The width of a table on an unlimited terminal."""
    unbounded = console.options.update(max_width=10_000)
    return Measurement.get(console, unbounded, table).maximum


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f} {self._unit}/s" if speed else "", style="progress.data.speed")


def size(count: int) -> str:
    """A number of bytes in a unit that people read easily.

    >>> size(1536)
    '1.5 KiB'
    """
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
