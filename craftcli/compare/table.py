"""The columns of a comparison, and the text of its cells."""

from collections.abc import Callable
from dataclasses import dataclass

from craftcli.compare.compare import ArmResult, Comparison
from craftcli.compare.estimates import Estimate
from craftcli.compare.runs import NEW, OLD

NOTHING = "–"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One quantity, for every arm."""

    key: str
    title: str
    meaning: str
    show: Callable[[Estimate], str]

    def cell(self, row: ArmResult) -> str:
        """The text of an arm's cell."""
        estimate = row.estimates[self.key]
        return NOTHING if estimate is None else self.show(estimate)


def _success(estimate: Estimate) -> str:
    return f"{estimate.mean:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def _signed(estimate: Estimate) -> str:
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{round(estimate.mean, 2) + 0.0:+.2f}"


def _short(estimate: Estimate) -> str:
    return f"{estimate.mean:.3g}"


def _seconds(estimate: Estimate) -> str:
    return duration(estimate.mean)


def _memory(estimate: Estimate) -> str:
    return f"{estimate.mean / 2**30:.2f} GiB"


def _count(estimate: Estimate) -> str:
    return f"{estimate.mean:.0f}"


def _millions(estimate: Estimate) -> str:
    return f"{estimate.mean / 1e6:.3g} M"


COLUMNS = (
    Column(
        key=OLD,
        title="old success",
        meaning="Closed-loop success on the old tasks, with a 95 % interval.",
        show=_success,
    ),
    Column(
        key=NEW,
        title="new success",
        meaning="Closed-loop success on the new task, with a 95 % interval.",
        show=_success,
    ),
    Column(
        key="nbt",
        title="NBT",
        meaning="Forgetting: the teacher's success on the old tasks minus this arm's; 0 is none. "
        "BWT is its negative.",
        show=_signed,
    ),
    Column(
        key="drift",
        title="drift",
        meaning="L_ret on the anchors of the evaluation: share of the teacher's variance.",
        show=_short,
    ),
    Column(
        key="action_error",
        title="action error",
        meaning="Distance of the actions from the teacher's on the old data.",
        show=_short,
    ),
    Column(
        key="seconds",
        title="time",
        meaning="Time of training, including checkpoints.",
        show=_seconds,
    ),
    Column(
        key="peak_memory_bytes",
        title="memory",
        meaning="Peak memory of training, of the GPU or else of the process.",
        show=_memory,
    ),
    Column(
        key="anchors",
        title="anchors",
        meaning="Rows of the cache that the run holds.",
        show=_count,
    ),
    Column(
        key="trainable_parameters",
        title="trained",
        meaning="Number of trained parameters.",
        show=_millions,
    ),
)


def used_columns(comparison: Comparison) -> list[Column]:
    """The columns in which at least one arm has a value."""
    return [
        column
        for column in COLUMNS
        if any(row.estimates[column.key] is not None for row in comparison.rows)
    ]


def duration(seconds: float) -> str:
    """A time in words.

    >>> duration(75), duration(5400)
    ('1 min 15 s', '1 h 30 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
