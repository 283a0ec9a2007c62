"""The columns of a comparison, and its figures as people read them."""

from collections.abc import Callable
from dataclasses import dataclass

from craftcli.report.compare import ArmFigures, Comparison
from craftcli.report.compare_runs import NEW, OLD
from craftcli.report.figures import Figure

NOTHING = "–"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of every arm."""

    key: str
    title: str
    meaning: str
    show: Callable[[Figure], str]

    def cell(self, row: ArmFigures) -> str:
        """The figure of an arm as text."""
        figure = row.figures[self.key]
        return NOTHING if figure is None else self.show(figure)


def _success(figure: Figure) -> str:
    return f"{figure.mean:.2f} [{figure.low:.2f}, {figure.high:.2f}]"


def _signed(figure: Figure) -> str:
    # Rounding must not leave a minus before a zero.
    return f"{round(figure.mean, 2) + 0.0:+.2f}"


def _short(figure: Figure) -> str:
    return f"{figure.mean:.3g}"


def _seconds(figure: Figure) -> str:
    return duration(figure.mean)


def _memory(figure: Figure) -> str:
    return f"{figure.mean / 2**30:.2f} GiB"


def _count(figure: Figure) -> str:
    return f"{figure.mean:.0f}"


def _millions(figure: Figure) -> str:
    return f"{figure.mean / 1e6:.3g} M"


COLUMNS = (
    Column(
        key=OLD,
        title="old success",
        meaning="Closed-loop success on what the teacher could do, with a 95 % interval.",
        show=_success,
    ),
    Column(
        key=NEW,
        title="new success",
        meaning="Closed-loop success on the task that was trained, with a 95 % interval.",
        show=_success,
    ),
    Column(
        key="nbt",
        title="NBT",
        meaning="Forgetting: the teacher's success on the old tasks less this arm's; 0 is none. "
        "BWT is its negative.",
        show=_signed,
    ),
    Column(
        key="drift",
        title="drift",
        meaning="L_ret on anchors of the evaluation: share of the teacher's variance.",
        show=_short,
    ),
    Column(
        key="action_error",
        title="action error",
        meaning="Distance of the actions to the teacher's on the old data.",
        show=_short,
    ),
    Column(
        key="seconds",
        title="time",
        meaning="Time of training, with checkpoints.",
        show=_seconds,
    ),
    Column(
        key="peak_memory_bytes",
        title="memory",
        meaning="Peak memory of training: of the GPU, or of the process.",
        show=_memory,
    ),
    Column(
        key="anchors",
        title="anchors",
        meaning="Rows of the cache that are held.",
        show=_count,
    ),
    Column(
        key="trainable_parameters",
        title="trained",
        meaning="Parameters that are trained.",
        show=_millions,
    ),
)


def used_columns(comparison: Comparison) -> list[Column]:
    """The columns in which anything is known."""
    return [
        column
        for column in COLUMNS
        if any(row.figures[column.key] is not None for row in comparison.rows)
    ]


def duration(seconds: float) -> str:
    """A time as people read it.

    >>> duration(75), duration(5400)
    ('1 min 15 s', '1 h 30 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
