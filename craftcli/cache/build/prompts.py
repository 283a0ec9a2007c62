"""Instructions that replace those of the dataset, so that anchors cover more phrasings."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from craftcli.errors import EXIT_USAGE, CraftError

_TASK = "{task}"


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The lines of a prompts file; `{task}` in a line is replaced by the row's own instruction."""

    lines: tuple[str, ...] = (_TASK,)
    seed: int = 0

    @property
    def digest(self) -> str | None:
        """Digest of the lines; None when they change nothing."""
        if self.lines == (_TASK,):
            return None
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    def all_for(self, tasks: list[str]) -> list[str]:
        """Every instruction that rows of these tasks can get, without repetition."""
        return list(dict.fromkeys(self._fill(line, task) for line in self.lines for task in tasks))

    def choose(self, task: str, dataset_index: int) -> str:
        """The instruction of one row, drawn from the seed and the row's index alone."""
        drawn = np.random.default_rng([self.seed, dataset_index]).integers(len(self.lines))
        return self._fill(self.lines[int(drawn)], task)

    def change(self, tasks: list[str]) -> bool:
        """Whether any of these instructions can become another one."""
        return any(self._fill(line, task) != task for line in self.lines for task in tasks)

    @staticmethod
    def _fill(line: str, task: str) -> str:
        return line.replace(_TASK, task)


def read_prompts(file: Path | None, seed: int) -> Prompts:
    """Read a file with one prompt a line; without a file, the prompts are the dataset's own."""
    if file is None:
        return Prompts(seed=seed)
    try:
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise CraftError(
            f"Cannot read the prompts {file}.",
            why=f"{error}.",
            fix="give --prompts a text file with one instruction a line.",
            exit_code=EXIT_USAGE,
        ) from error
    kept = tuple(dict.fromkeys(line for line in lines if line))
    if not kept:
        raise CraftError(
            f"The prompts {file} are empty.",
            why="no line holds an instruction.",
            fix="write one instruction a line; {task} stands for the row's own.",
            exit_code=EXIT_USAGE,
        )
    return Prompts(lines=kept, seed=seed)
