"""The report as one HTML page that needs nothing but itself."""

import io
from html import escape
from importlib.resources import files
from string import Template

from matplotlib.figure import Figure as Picture

from craftcli import __version__
from craftcli.report.arm_style import COLOURS, GRID, INK, MUTED, PAPER
from craftcli.report.compare import ArmFigures, Comparison
from craftcli.report.compare_table import NOTHING, Column, used_columns
from craftcli.report.figures import Figure

_SUCCESS = ("old", "new")


def make_page(
    comparison: Comparison, *, title: str, trade_off: Picture | None, curves: Picture | None
) -> str:
    """The whole page."""
    columns = used_columns(comparison)
    template = Template((files("craftcli.report") / "page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(title),
        lead=escape(_lead(comparison)),
        notes=_notes(comparison),
        head="".join([_head("arm", "A way of fine-tuning"), *map(_column_head, columns)]),
        rows="\n".join(_row(row, columns) for row in comparison.rows),
        trade_off=_figure("Trade-off", trade_off, "Success on the old tasks against the new one"),
        curves=_figure("How training went", curves, "Curves of training", wide=True),
        meanings="".join(_definition(c.title, escape(c.meaning)) for c in columns),
        runs="".join(_definition(row.arm.label, _folders(row)) for row in comparison.rows),
        footer=f"Made by craft {escape(__version__)}, craft compare.",
    )


def _lead(comparison: Comparison) -> str:
    arms, runs = len(comparison.arms), sum(row.arm.seeds for row in comparison.arms)
    text = f"{_many(arms, 'arm')}, {_many(runs, 'run')}."
    for role in _SUCCESS:
        names = [name for name, own in comparison.environments.items() if own == role]
        if names:
            text += f" {role.capitalize()}: {', '.join(names)}."
    return text


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _notes(comparison: Comparison) -> str:
    if not comparison.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    return f'<section class="notes"><h2>Not compared, or missing</h2><ul>{items}</ul></section>'


def _column_head(column: Column) -> str:
    return _head(column.title, column.meaning)


def _head(title: str, meaning: str) -> str:
    return f'<th scope="col" title="{escape(meaning)}"><button>{escape(title)}</button></th>'


def _row(row: ArmFigures, columns: list[Column]) -> str:
    number, reference = row.arm.number, row.arm.number == 0
    badge = "T" if reference else str(number)
    style = "" if reference else f' style="background: {_arm_colour(row.arm.hue)}"'
    name = (
        f'<td data-value="{escape(row.arm.label)}"><span class="badge"{style}>{badge}</span>'
        f"{escape(row.arm.label)}{_seeds(row)}</td>"
    )
    cells = "".join(_cell(row, column) for column in columns)
    kind = ' class="reference"' if reference else ""
    return f'<tr data-arm="{number}"{kind}>{name}{cells}</tr>'


def _seeds(row: ArmFigures) -> str:
    return "" if row.arm.seeds == 1 else f' <span class="sub">{row.arm.seeds} seeds</span>'


def _cell(row: ArmFigures, column: Column) -> str:
    figure = row.figures[column.key]
    if figure is None:
        return f'<td data-value="">{NOTHING}</td>'
    told = _told(row, column, figure)
    text = escape(column.show(figure))
    if column.key in _SUCCESS:
        style = "" if row.arm.hue == 0 else f' style="color: {_arm_colour(row.arm.hue)}"'
        mean, _, interval = text.partition(" ")
        text = f'{mean} <span class="sub">{interval}</span>'
        text += f'<div class="range"{style}>{_bar(figure)}</div>'
    return f'<td data-value="{figure.mean:.6g}"{told}>{text}</td>'


def _told(row: ArmFigures, column: Column, figure: Figure) -> str:
    """What a figure was made of, as a tip."""
    lines = []
    if len(figure.values) > 1:
        lines.append("by seed: " + ", ".join(f"{value:.4g}" for value in figure.values))
    if column.key in _SUCCESS and len(row.by_environment) > 1:
        lines += [f"{name}: {found.mean:.2f}" for name, found in row.by_environment.items()]
    return f' title="{escape(chr(10).join(lines))}"' if lines else ""


def _bar(figure: Figure) -> str:
    low, high = figure.low or 0.0, 1.0 if figure.high is None else figure.high
    return (
        f'<i style="left: {low:.1%}; width: {high - low:.1%}"></i>'
        f'<b style="left: {figure.mean:.1%}"></b>'
    )


def _definition(term: str, meaning: str) -> str:
    return f"<dt>{escape(term)}</dt><dd>{meaning}</dd>"


def _folders(row: ArmFigures) -> str:
    return "<br>".join(f"<code>{escape(str(run.folder))}</code>" for run in row.arm.runs)


def _figure(title: str, picture: Picture | None, label: str, *, wide: bool = False) -> str:
    if picture is None:
        return ""
    kind = ' class="wide"' if wide else ""
    svg = svg_of(picture).replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
    return f"<section><h2>{escape(title)}</h2><figure{kind}>{svg}</figure></section>"


def svg_of(picture: Picture) -> str:
    """A picture as SVG in the colours of the page, which follow light and dark."""
    buffer = io.StringIO()
    picture.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    # The XML declaration has no place inside HTML.
    svg = buffer.getvalue()[buffer.getvalue().index("<svg ") :]
    for own, of_page in ((INK, "ink"), (MUTED, "muted"), (GRID, "grid"), (PAPER, "paper")):
        svg = svg.replace(own.lower(), f"var(--{of_page})")
    for hue, own in enumerate(COLOURS, 1):
        svg = svg.replace(own.lower(), _arm_colour(hue))
    return svg


def _arm_colour(hue: int) -> str:
    return f"var(--arm-{(hue - 1) % len(COLOURS)})"
