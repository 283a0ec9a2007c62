"""Success on every task after each of a row of tasks, and what is made of it in the literature."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from craftcli.compare.estimates import over_seeds


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One run through all tasks."""

    arm: str
    seed: int
    rows: tuple[tuple[float, ...], ...]
    """After task k: success on tasks 0 to k. Joint training has the last row alone."""

    @property
    def in_turn(self) -> bool:
        """Whether the tasks were learned one after the other."""
        return len(self.rows) == len(self.rows[-1])

    @property
    def average(self) -> float:
        """Success over all tasks in the end, as Continual World reports it."""
        return fmean(self.rows[-1])

    @property
    def just_learned(self) -> tuple[float, ...]:
        """Success on each task just after it was learned."""
        return tuple(row[-1] for row in self.rows) if self.in_turn else self.rows[-1]

    @property
    def forward(self) -> float:
        """Success on each task just after it was learned, LIBERO's FWT measured at the end."""
        return fmean(self.just_learned)

    @property
    def forgetting(self) -> float | None:
        """Continual World's: success just after learning minus success in the end, mean."""
        if not self.in_turn:
            return None
        return self.forward - self.average

    @property
    def forgotten(self) -> float | None:
        """LIBERO's NBT: what was lost of a task since it was learned, over all later moments."""
        if not self.in_turn or len(self.rows) == 1:
            return None
        lost = [
            fmean(self.rows[task][task] - later[task] for later in self.rows[task + 1 :])
            for task in range(len(self.rows) - 1)
        ]
        return fmean(lost)

    def transfer(self, alone: Sequence[float]) -> float:
        """Forward transfer: success just after learning minus that of policies of one task.

        Continual World compares areas under training curves. There are no curves here.
        """
        return self.forward - fmean(alone)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Matrix":
        """What `to_json` wrote; the measures are computed from the rows again."""
        rows = tuple(tuple(row) for row in entry["rows"])
        return cls(arm=entry["arm"], seed=entry["seed"], rows=rows)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        names = ("average", "forward", "forgetting", "forgotten")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


def earlier_matrices(entries: Sequence[Mapping[str, Any]], newer: Sequence[Matrix]) -> list[Matrix]:
    """The published matrices of arms and seeds that were not measured again."""
    again = {(matrix.arm, matrix.seed) for matrix in newer}
    known = [Matrix.from_json(entry) for entry in entries]
    return [matrix for matrix in known if (matrix.arm, matrix.seed) not in again]


def matrices_table(
    tasks: Sequence[str], matrices: Sequence[Matrix], alone: Sequence[float] | None = None
) -> str:
    """The last row of every arm's matrix, mean over seeds, with what was learned and forgotten.

    `alone` is the success of policies that learned one task each; with it, the measures are those
    of Continual World.
    """
    names = [task.removesuffix("-v3") for task in tasks]
    measures: dict[str, Callable[[Matrix], float | None]] = {
        "average": lambda matrix: matrix.average,
        "just learned": lambda matrix: matrix.forward,
    }
    if alone is not None:
        measures["forgetting"] = lambda matrix: matrix.forgetting
        measures["forward transfer"] = lambda matrix: matrix.transfer(alone)
    measures["NBT"] = lambda matrix: matrix.forgotten
    rows = [head := ["arm", "seeds", *names, *measures], ["---"] * len(head)]
    for arm in dict.fromkeys(matrix.arm for matrix in matrices):
        own = [matrix for matrix in matrices if matrix.arm == arm]
        last = [f"{fmean(values):.2f}" for values in zip(*(m.rows[-1] for m in own), strict=True)]
        cells = [_over([measure(m) for m in own]) for measure in measures.values()]
        rows.append([arm, str(len(own)), *last, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _over(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    figure = over_seeds(known)
    # Rounding must not leave a minus before a zero.
    mean = f"{round(figure.mean, 2) + 0.0:.2f}"
    return mean if figure.low is None else f"{mean} ± {figure.mean - figure.low:.2f}"
