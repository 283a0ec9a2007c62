"""The one place that writes to the terminal: results to stdout, everything else to stderr."""

import json
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

from craftcli.errors import CraftError


class Output:
    """Where a command prints; with `--json`, stdout carries nothing but one JSON document."""

    def __init__(self, *, as_json: bool = False, debug: bool = False, silent: bool = False) -> None:
        self.as_json = as_json and not silent
        self.debug = debug
        # Highlighting would colour numbers in lines that other programs read.
        self._data = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=silent)
        self._notes = Console(file=sys.stderr, highlight=False, soft_wrap=True, quiet=silent)
        self._bar_running = False

    def for_first(self, *, is_first: bool) -> "Output":
        """This output for the first of several processes, silence for the others."""
        return self if is_first else Output(debug=self.debug, silent=True)

    @property
    def _result(self) -> Console:
        # A bar on the same terminal is redrawn below what its own console prints, and only that.
        below_bar = self._bar_running and self._data.is_terminal
        return self._notes if self.as_json or below_bar else self._data

    def say(self, text: str = "") -> None:
        """A line of the command's result."""
        self._result.print(escape(text))

    def table(self, title: str, rows: Mapping[str, Any]) -> None:
        """Names and values, aligned."""
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(escape(name), escape(str(value)))
        self._result.print(table)

    def grid(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows of cells under titles; the first two columns are words, the others figures.

        On a narrow terminal the figures are spread over several tables.
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
                # A file or another program has no width, and rich would take it to be 80.
                wide = _width(table, console)
                console = Console(
                    file=console.file, highlight=False, width=wide, quiet=console.quiet
                )
            console.print(table)

    def json(self, document: Any) -> None:
        """The command's result as JSON, if it was asked for."""
        if self.as_json:
            sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")

    def note(self, text: str) -> None:
        """Something worth knowing that is no result."""
        self._notes.print(escape(text), style="dim")

    def warn(self, text: str) -> None:
        """Something the user may want to act on."""
        self._notes.print(f"[yellow]Warning:[/yellow] {escape(text)}")

    def error(self, error: CraftError) -> None:
        """What, why and fix."""
        self._notes.print(f"[bold red]Error:[/bold red] {escape(error.what)}")
        self._notes.print(f"  [bold]Why:[/bold] {escape(error.why)}")
        self._notes.print(f"  [bold]Fix:[/bold] {escape(error.fix)}")

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Say what is going on while something takes a while."""
        if not self._notes.is_terminal:
            self.note(text)
            yield
            return
        with self._notes.status(escape(text)):
            yield

    @contextmanager
    def progress(self, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """A bar with rate and time left, on a terminal only; call what it gives to advance it."""
        columns: tuple[ProgressColumn, ...] = (
            SpinnerColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            _Rate(unit),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        shown = self._notes.is_terminal
        with Progress(*columns, console=self._notes, disable=not shown) as progress:
            task = progress.add_task("", total=total)
            self._bar_running = shown
            try:
                yield lambda count: progress.advance(task, count)
            finally:
                self._bar_running = False


def _grid(titles: Sequence[str], rows: Sequence[Sequence[str]], figures: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (0, 1):
        table.add_column(escape(titles[column]))
    for column in figures:
        table.add_column(escape(titles[column]), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(row[column]) for column in (0, 1, *figures)))
    return table


def _width(table: Table, console: Console) -> int:
    """How wide a table would be if it could."""
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
    """A number of bytes as people read it.

    >>> size(1536)
    '1.5 KiB'
    """
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
