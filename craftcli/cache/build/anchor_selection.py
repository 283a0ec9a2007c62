"""Selects the frames of a dataset that become anchors, from the settings and the dataset alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Sampling
from craftcli.config.cache import CacheConfig
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.locations import Location
from craftcli.policies.identity import common_frames
from craftcli.policies.lerobot.identity import dataset_identity, identities
from craftcli.policies.lerobot.several_datasets import labels
from craftcli.policies.lerobot.weighted_sampler import apportion


def select_rows(config: CacheConfig, dataset: Any) -> list[int]:
    """Select rows of a dataset, or of several by their weights; they are sorted and different.

    Several datasets without weights are drawn from as if they were one.
    """
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
    draw = _drawing(config.sampling, table)
    if not getattr(dataset, "is_weighted", False):
        return _sorted(draw(rows, config.samples, rng))
    begins = zip(dataset.offsets[:-1], dataset.offsets[1:], strict=True)
    own = [rows[(rows >= low) & (rows < high)] for low, high in begins]
    samples = apportion(config.samples, dataset.shares)
    _require_enough_of_each(own, samples, dataset)
    parts = zip(own, samples, strict=True)
    return [row for rows, count in parts for row in _sorted(draw(rows, count, rng))]


type _Drawing = Callable[[NDArray[Any], int, np.random.Generator], NDArray[Any]]


def _drawing(sampling: Sampling, table: Any) -> _Drawing:
    """How to draw so many of some rows."""

    def column(name: str) -> NDArray[Any]:
        values: NDArray[Any] = table.column(name).to_numpy()
        return values

    match sampling:
        case Sampling.UNIFORM:
            return lambda rows, samples, rng: rng.choice(rows, size=samples, replace=False)
        case Sampling.PER_EPISODE | Sampling.PER_TASK:
            groups = column("episode_index" if sampling is Sampling.PER_EPISODE else "task_index")
            return lambda rows, samples, rng: balanced(rows, groups[rows], samples, rng)
        case Sampling.PER_PHASE:
            phases = _phases(column("episode_index"), column("frame_index"))
            return lambda rows, samples, rng: _through(rows, phases[rows], samples, rng)


def _phases(episodes: NDArray[Any], frames: NDArray[Any]) -> NDArray[np.float64]:
    """The place of each frame in its episode: 0 is the first, 1 the last."""
    _, number = np.unique(episodes, return_inverse=True)
    last = np.zeros(number.max() + 1)
    np.maximum.at(last, number, frames)
    phases: NDArray[np.float64] = frames / np.maximum(last, 1)[number]
    return phases


def _through(
    rows: NDArray[Any], phases: NDArray[Any], samples: int, rng: np.random.Generator
) -> NDArray[Any]:
    """One row at random from each of `samples` stretches, which hold the same number of rows."""
    shuffled = rng.permutation(len(rows))
    order = shuffled[np.argsort(phases[shuffled], kind="stable")]
    return np.array([rng.choice(rows[part]) for part in np.array_split(order, samples)])


def _sorted(rows: NDArray[Any]) -> list[int]:
    return sorted(int(row) for row in rows)


def most_samples(dataset: Any) -> int:
    """The most anchors that a dataset has frames for; several datasets give them by weights."""
    if not getattr(dataset, "is_weighted", False):
        return len(dataset)
    return max(_most(list(map(len, dataset.parts)), dataset.shares), len(dataset.parts))


def _most(frames: Sequence[int], shares: Sequence[float]) -> int:
    """The largest number of samples that, divided by these shares, every dataset has frames for."""
    most = min(int((have + 1) / share) + 1 for have, share in zip(frames, shares, strict=True))
    while most > len(shares) and any(
        count > have for count, have in zip(apportion(most, shares), frames, strict=True)
    ):
        most -= 1
    return most


def balanced(
    rows: NDArray[Any], groups: NDArray[Any], samples: int, rng: np.random.Generator
) -> NDArray[Any]:
    """Pick the same number of rows from each group, as far as the groups have enough.

    Every group is shuffled, and the groups give one row each in turn until there are enough. Which
    groups give one row more is random too.
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
    """Read numbers and ranges such as 0-9,12.

    >>> parse_ranges("0-2, 5", "--episodes", 9)
    [0, 1, 2, 5]
    """
    numbers: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise _refused(
                f"{option} cannot be read.", f"{part.strip()!r} is not a number or a range."
            )
        numbers.update(range(int(low), int(high or low) + 1))
    beyond = [number for number in sorted(numbers) if number > last]
    if beyond:
        raise _refused(
            f"{option} goes beyond the dataset.", f"{beyond[0]} is too large, the last is {last}."
        )
    return sorted(numbers)


def _explicit(text: str, candidates: NDArray[Any], frames: int) -> list[int]:
    """Rows that the user listed, in the option or in a file with one number a line."""
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
    """The frames that another cache of the same dataset holds."""
    reader = CacheReader.open(cache)
    cached, given = reader.manifest.dataset, dataset_identity(dataset, [])
    common = common_frames(reader.manifest.parts, identities(dataset))
    if not common:
        raise CraftError(
            f"--exclude {cache} cannot be used.",
            why=f"its frames are those of another dataset, {cached.repo_id} (fingerprint "
            f"{cached.fingerprint[:12]}, not {given.fingerprint[:12]}).",
            fix="leave --exclude out: that cache holds no frame of this dataset.",
            exit_code=EXIT_USAGE,
        )
    frames = reader.read_all("index/dataset_index")
    return np.concatenate([own.in_second(frames) for own in common])


def _require_enough(frames: int, samples: int, config: CacheConfig) -> None:
    if samples > frames:
        where = "the chosen episodes have" if config.episodes else "the dataset has"
        where = f"without those of {config.exclude} {where}" if config.exclude else where
        raise CraftError(
            f"Cannot select {samples} anchors.",
            why=f"{where} {frames} frames.",
            fix=f"use --samples {frames} or fewer.",
            exit_code=EXIT_USAGE,
        )


def _require_enough_of_each(
    own: Sequence[NDArray[Any]], samples: Sequence[int], dataset: Any
) -> None:
    """Refuse weights for which a dataset has too few frames; none is taken twice."""
    frames = [len(rows) for rows in own]
    problems = [
        f"{name} has {have} frames, and its share ({share:.1%}) is {wanted}"
        for name, have, wanted, share in zip(
            labels(dataset.parts), frames, samples, dataset.shares, strict=True
        )
        if wanted > have
    ]
    if problems:
        raise CraftError(
            f"Cannot select {sum(samples)} anchors with these weights.",
            why="; ".join(problems) + ".",
            fix=f"use --samples {_most(frames, dataset.shares)} or fewer, or other weights.",
            exit_code=EXIT_USAGE,
        )


def _refused(what: str, why: str) -> CraftError:
    return CraftError(
        what, why=why, fix="write numbers and ranges, as in 0-9,12.", exit_code=EXIT_USAGE
    )
