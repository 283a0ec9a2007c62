"""Success on every task after each of a row of tasks, and what is made of it in the literature."""

from collections.abc import Mapping, Sequence
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
    """After task k: success on tasks 0 to k."""

    @property
    def average(self) -> float:
        """Success over all tasks in the end, as Continual World reports it."""
        return fmean(self.rows[-1])

    @property
    def forward(self) -> float:
        """Success on each task just after it was learned, LIBERO's FWT measured at the end."""
        return fmean(row[-1] for row in self.rows)

    @property
    def forgotten(self) -> float:
        """LIBERO's NBT: what was lost of a task since it was learned, over all later moments."""
        lost = [
            fmean(self.rows[task][task] - later[task] for later in self.rows[task + 1 :])
            for task in range(len(self.rows) - 1)
        ]
        return fmean(lost)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Matrix":
        """What `to_json` wrote; the measures are computed from the rows again."""
        rows = tuple(tuple(row) for row in entry["rows"])
        return cls(arm=entry["arm"], seed=entry["seed"], rows=rows)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        measures = {name: getattr(self, name) for name in ("average", "forward", "forgotten")}
        return {**asdict(self), **measures}


def matrices_table(tasks: Sequence[str], matrices: Sequence[Matrix]) -> str:
    """The last row of every arm's matrix, mean over seeds, with what was learned and forgotten."""
    names = [task.removesuffix("-v3") for task in tasks]
    head = ["arm", "seeds", *names, "average", "just learned", "NBT"]
    rows = [head, ["---"] * len(head)]
    for arm in dict.fromkeys(matrix.arm for matrix in matrices):
        own = [matrix for matrix in matrices if matrix.arm == arm]
        last = [f"{fmean(values):.2f}" for values in zip(*(m.rows[-1] for m in own), strict=True)]
        measures = [
            _over([m.average for m in own]),
            _over([m.forward for m in own]),
            _over([m.forgotten for m in own]),
        ]
        rows.append([arm, str(len(own)), *last, *measures])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _over(values: Sequence[float]) -> str:
    figure = over_seeds(values)
    # Rounding must not leave a minus before a zero.
    mean = f"{round(figure.mean, 2) + 0.0:.2f}"
    return mean if figure.low is None else f"{mean} ± {figure.mean - figure.low:.2f}"
