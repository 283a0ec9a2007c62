"""The outcomes of faults, counted by their kind."""

import secrets
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """What became of one fault."""

    FOUND = "found"
    """An error that explains it, or a failed check."""
    SHOWN = "shown"
    """No error, and the output says what is missing."""
    HARMLESS = "harmless"
    """The result is that of the undisturbed artefact."""
    SILENT = "silent"
    """No error, and another result."""
    UNEXPLAINED = "unexplained"
    """An error without an explanation."""
    LOST = "lost"
    """Something is gone that craft did not write in this operation."""


SEED_VARIABLE = "CRAFT_FAULT_SEED"
BAD = (Outcome.SILENT, Outcome.UNEXPLAINED, Outcome.LOST)


def draw_seed(environment: Mapping[str, str]) -> int:
    """The seed that the user gives; else a new one, so that every run tries other faults."""
    given = environment.get(SEED_VARIABLE)
    return secrets.randbelow(10**6) if given is None else int(given)


@dataclass
class Tally:
    """All faults of a series."""

    seed: int
    counts: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    """What was wrong, with what is needed to see it again."""

    def add(self, kind: str, outcome: Outcome, what: str) -> None:
        """Count a fault."""
        self.counts[kind, outcome] += 1
        if outcome in BAD:
            self.bad.append(f"{outcome}: {kind}: {what}")
            print(f"seed {self.seed}: {self.bad[-1]}", file=sys.stderr, flush=True)

    def total(self, outcome: Outcome | None = None) -> int:
        """How many faults there were, or how many had this outcome."""
        return sum(n for (_, own), n in self.counts.items() if outcome in (None, own))

    def rows(self) -> dict[str, dict[str, int]]:
        """The counts of every outcome by the kind of fault."""
        kinds = sorted({kind for kind, _ in self.counts})
        return {kind: {o.value: self.counts[kind, o] for o in Outcome} for kind in kinds}

    def line(self) -> str:
        """All counts in one line."""
        kinds = [f"{kind} {sum(row.values())}" for kind, row in self.rows().items()]
        outcomes = [f"{outcome} {self.total(outcome)}" for outcome in Outcome]
        return (
            f"seed {self.seed}: {self.total()} faults ({', '.join(kinds)}): {', '.join(outcomes)}"
        )

    def again(self) -> str:
        """How to see the same faults again."""
        return f"{SEED_VARIABLE}={self.seed} pytest -n0 tests/faults"

    def table(self) -> str:
        """The counts as a table in Markdown."""
        lines = [f"| fault | {' | '.join(Outcome)} |", f"|---|{'---|' * len(Outcome)}"]
        totals = {outcome.value: self.total(outcome) for outcome in Outcome}
        for kind, row in [*self.rows().items(), ("all", totals)]:
            lines.append(f"| {kind} | {' | '.join(str(n) for n in row.values())} |")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"seed": self.seed, "faults": self.total(), "kinds": self.rows(), "bad": self.bad}
