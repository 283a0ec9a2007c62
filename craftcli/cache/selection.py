"""Which frames of a dataset become anchors: a pure function of the settings and the dataset."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.reader import CacheReader
from craftcli.choices import Sampling
from craftcli.config import CacheConfig
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.locations import Location
from craftcli.policies.identity import dataset_identity


def select_rows(config: CacheConfig, dataset: Any) -> list[int]:
    """The selected rows of a LeRobotDataset, sorted, all different."""
    table = dataset.hf_dataset.data
    episodes = table.column("episode_index").to_numpy()
    rows: NDArray[Any] = np.arange(len(episodes))
    if config.episodes is not None:
        wanted = parse_ranges(config.episodes, "--episodes", int(episodes.max()))
        rows = rows[np.isin(episodes, wanted)]
    if config.indices is not None:
        return _explicit(config.indices, rows, len(episodes))
    if config.exclude is not None:
        rows = np.setdiff1d(rows, _taken(config.exclude, dataset))
    _require_enough(len(rows), config.samples, config)
    rng = np.random.default_rng(config.seed)
    match config.sampling:
        case Sampling.PER_EPISODE:
            chosen = balanced(rows, episodes[rows], config.samples, rng)
        case Sampling.PER_TASK:
            tasks = table.column("task_index").to_numpy()
            chosen = balanced(rows, tasks[rows], config.samples, rng)
        case _:
            chosen = rng.choice(rows, size=config.samples, replace=False)
    return sorted(int(row) for row in chosen)


def balanced(
    rows: NDArray[Any], groups: NDArray[Any], samples: int, rng: np.random.Generator
) -> NDArray[Any]:
    """As many rows of each group as of any other, as far as the groups reach.

    Every group is shuffled, and each in turn gives its next row until there are enough; which
    groups give one more than others is drawn too.
    """
    order = rng.permutation(len(rows))
    rows, groups = rows[order], groups[order]
    turn = np.empty(len(rows), dtype=np.int64)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        turn[members] = np.arange(len(members))
    # Stable, so that within a turn the groups come in the order of the shuffle.
    picked: NDArray[Any] = rows[np.argsort(turn, kind="stable")[:samples]]
    return picked


def parse_ranges(text: str, option: str, last: int) -> list[int]:
    """Numbers written as 0-9,12.

    >>> parse_ranges("0-2, 5", "--episodes", 9)
    [0, 1, 2, 5]
    """
    numbers: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise _refused(f"{option} cannot be read.", f"{part.strip()!r} is no number or range.")
        numbers.update(range(int(low), int(high or low) + 1))
    beyond = [number for number in sorted(numbers) if number > last]
    if beyond:
        raise _refused(
            f"{option} goes beyond the dataset.", f"{beyond[0]} is asked for, the last is {last}."
        )
    return sorted(numbers)


def _explicit(text: str, candidates: NDArray[Any], frames: int) -> list[int]:
    """Rows named one by one: a list, or a file with one a line."""
    file = Path(text)
    if file.is_file():
        text = ",".join(line for line in file.read_text().splitlines() if line.strip())
    rows = parse_ranges(text, "--indices", frames - 1)
    outside = set(rows) - set(candidates.tolist())
    if outside:
        raise _refused(
            "--indices and --episodes contradict each other.",
            f"frame {min(outside)} is in none of the episodes.",
        )
    return rows


def _taken(cache: Location, dataset: Any) -> NDArray[Any]:
    """The frames that another cache of the same dataset has."""
    reader = CacheReader.open(cache)
    cached, given = reader.manifest.dataset, dataset_identity(dataset, [])
    if cached.fingerprint != given.fingerprint:
        raise CraftError(
            f"--exclude {cache} cannot be used.",
            why=f"its frames are those of another dataset, {cached.repo_id} (fingerprint "
            f"{cached.fingerprint[:12]}, not {given.fingerprint[:12]}).",
            fix="leave it out: all frames of this dataset are held out from that cache.",
            exit_code=EXIT_USAGE,
        )
    return reader.read_all("index/dataset_index")


def _require_enough(frames: int, samples: int, config: CacheConfig) -> None:
    if samples > frames:
        where = "the chosen episodes have" if config.episodes else "the dataset has"
        where = f"without those of {config.exclude} {where}" if config.exclude else where
        raise CraftError(
            f"Cannot select {samples} anchors.",
            why=f"{where} {frames} frames.",
            fix=f"ask for --samples {frames} or fewer.",
            exit_code=EXIT_USAGE,
        )


def _refused(what: str, why: str) -> CraftError:
    return CraftError(
        what, why=why, fix="write numbers and ranges, as in 0-9,12.", exit_code=EXIT_USAGE
    )
