"""The report as one HTML page without other files; `page.html` beside this module is its template.

The template holds the markup and escapes all text but the SVG, in which matplotlib escapes it.
"""

import io
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from craftcli import __version__
from craftcli.compare.arm_style import COLOURS, GRID, INK, MUTED, PAPER
from craftcli.compare.compare import ArmResult, Comparison
from craftcli.compare.estimates import Estimate
from craftcli.compare.runs import NEW, OLD
from craftcli.compare.table import NOTHING, Column, used_columns


@dataclass(frozen=True, kw_only=True)
class _Plot:
    """A plot on the page."""

    title: str
    label: str
    """What it shows, for people who cannot see it."""
    svg: str
    wide: bool = False


def make_page(
    comparison: Comparison, *, title: str, trade_off: Figure | None, curves: Figure | None
) -> str:
    """Render the page."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.from_string((files(__package__) / "page.html").read_text("utf-8"))
    plots = []
    if trade_off is not None:
        label = "Success on the old tasks against the new one"
        plots.append(_Plot(title="Trade-off", label=label, svg=svg_of(trade_off)))
    if curves is not None:
        label = "Curves of training"
        plots.append(_Plot(title="How training went", label=label, svg=svg_of(curves), wide=True))
    return template.render(
        title=title,
        lead=_lead(comparison),
        notes=comparison.notes,
        columns=used_columns(comparison),
        rows=comparison.rows,
        plots=plots,
        version=__version__,
        success=(OLD, NEW),
        nothing=NOTHING,
        arm_colour=arm_colour,
        details=_details,
        interval=_interval,
    )


def svg_of(plot: Figure) -> str:
    """A plot as SVG in the colours of the page, which follow light and dark mode."""
    buffer = io.StringIO()
    plot.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    # The XML declaration is not allowed inside HTML.
    svg = buffer.getvalue()[buffer.getvalue().index("<svg ") :]
    for own, of_page in ((INK, "ink"), (MUTED, "muted"), (GRID, "grid"), (PAPER, "paper")):
        svg = svg.replace(own.lower(), f"var(--{of_page})")
    for hue, own in enumerate(COLOURS, 1):
        svg = svg.replace(own.lower(), arm_colour(hue))
    return svg


def arm_colour(hue: int) -> str:
    """The page's colour of an arm."""
    return f"var(--arm-{(hue - 1) % len(COLOURS)})"


def _lead(comparison: Comparison) -> str:
    arms, runs = len(comparison.arms), sum(row.arm.seeds for row in comparison.arms)
    text = f"{_count(arms, 'arm')}, {_count(runs, 'run')}."
    for role in (OLD, NEW):
        names = [name for name, own in comparison.environments.items() if own == role]
        if names:
            text += f" {role.capitalize()}: {', '.join(names)}."
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _details(row: ArmResult, column: Column, estimate: Estimate) -> str:
    """The values behind a cell, by seed and by environment, as a tooltip."""
    lines = []
    if len(estimate.values) > 1:
        lines.append("by seed: " + ", ".join(f"{value:.4g}" for value in estimate.values))
    if column.key in (OLD, NEW) and len(row.by_environment) > 1:
        lines += [f"{name}: {found.mean:.2f}" for name, found in row.by_environment.items()]
    return "\n".join(lines)


def _interval(estimate: Estimate) -> dict[str, str]:
    """Where the bar of a success cell starts, how wide it is, and where its mark is."""
    low, high = estimate.low or 0.0, 1.0 if estimate.high is None else estimate.high
    return {"low": f"{low:.1%}", "width": f"{high - low:.1%}", "mean": f"{estimate.mean:.1%}"}
