"""Reads `metrics.jsonl` for the curves: any number of lines, a bounded number of points."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from craftcli.errors import EXIT_CHECK_FAILED, CraftError

MEASURED = ("eval_old_loss", "eval_new_loss", "eval_old_success", "eval_new_success")
"""What --eval-every measures; only few lines have it."""
CURVES = ("loss", "l_ret", "epsilon", "lam", "cos", "conflict_rate", *MEASURED)
"""What is drawn."""
MOST_POINTS = 2000
"""A long run keeps this many points, or up to twice as many: more than a panel has pixels."""
_LONGEST_LINE = 2**20


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The points of a run, evenly spaced over its log lines, the first and last included."""

    points: tuple[Mapping[str, Any], ...]
    """The step, and what is drawn, of each line that is kept."""
    digest: str
    """Of the whole file, to recognise a copy."""


def read_curves(file: Path) -> Curves:
    """Read the points of a run, in one pass and in bounded memory; none if there is no file.

    Lines between two points are not parsed.

    Raises:
        CraftError: a line is not what a run writes.
    """
    digest = hashlib.sha256()
    points: list[Mapping[str, Any]] = []
    stride, number, last = 1, -1, b""
    try:
        with file.open("rb") as opened:
            for number, last in enumerate(_lines(opened, file)):
                digest.update(last)
                if number % stride == 0:
                    points.append(_parse(last, number, file))
                if len(points) > 2 * MOST_POINTS:
                    points, stride = points[::2], 2 * stride
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _damaged(file, f"{error.strerror or error}") from error
    if number % stride:
        points.append(_parse(last, number, file))
    return Curves(points=tuple(points), digest=digest.hexdigest())


def _lines(opened: BinaryIO, file: Path) -> Iterator[bytes]:
    while line := opened.readline(_LONGEST_LINE):
        if line.endswith(b"\n"):
            yield line
        elif len(line) == _LONGEST_LINE:
            raise _damaged(file, f"a line has more than {_LONGEST_LINE} bytes")
        # Else a run that was killed, or is writing now, left half a line at the end.


def _parse(line: bytes, number: int, file: Path) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        point = {name: entry.get(name) for name in ("step", *CURVES)}
    except (ValueError, AttributeError, RecursionError) as error:
        raise _damaged(file, f"line {number + 1} is not a JSON object") from error
    known = {name: value for name, value in point.items() if value is not None}
    wrong = [name for name, value in known.items() if not _is_number(value)]
    if wrong or "step" not in known:
        raise _damaged(file, f"{wrong[0] if wrong else 'step'} of line {number + 1} is no number")
    return known


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _damaged(file: Path, problem: str) -> CraftError:
    return CraftError(
        f"Cannot read {file}.",
        why=f"{problem}.",
        fix="restore it from a copy, or remove it: the run is then compared without its curves.",
        exit_code=EXIT_CHECK_FAILED,
    )
