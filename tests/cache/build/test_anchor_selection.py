"""Which frames become anchors, by every way of choosing them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craftcli.cache.build.anchor_selection import balanced, parse_ranges, select_rows
from craftcli.choices import Sampling
from craftcli.config.cache import CacheConfig
from craftcli.errors import EXIT_USAGE, CraftError


def dataset(lengths: list[int], tasks: list[int] | None = None) -> Any:
    """The columns that the selection reads, as a LeRobotDataset keeps them."""
    episodes = np.repeat(np.arange(len(lengths)), lengths)
    task_of = np.asarray(tasks or [0] * len(lengths))
    frames = np.concatenate([np.arange(length) for length in lengths])
    table = pa.table(
        {"episode_index": episodes, "task_index": task_of[episodes], "frame_index": frames}
    )
    return SimpleNamespace(hf_dataset=SimpleNamespace(data=table))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.sampled_from(list(Sampling)),
    st.integers(0, 5),
    st.data(),
)
def test_rows_are_different_sorted_and_seeded(
    lengths: list[int], sampling: Sampling, seed: int, data: st.DataObject
) -> None:
    samples = data.draw(st.integers(1, sum(lengths)))
    config = CacheConfig(samples=samples, sampling=sampling, seed=seed)
    rows = select_rows(config, dataset(lengths))
    assert rows == sorted(set(rows)) == select_rows(config, dataset(lengths))
    assert len(rows) == samples
    assert 0 <= rows[0] <= rows[-1] < sum(lengths)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.data())
def test_balanced_groups_differ_by_at_most_one_while_they_last(
    sizes: list[int], data: st.DataObject
) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    samples = data.draw(st.integers(1, len(groups)))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    picked = groups[balanced(np.arange(len(groups)), groups, samples, rng)]
    counts = np.bincount(picked, minlength=len(sizes))
    assert counts.sum() == samples
    # A group gave fewer than the others only because it had no more.
    for count, size in zip(counts, sizes, strict=True):
        assert count == size or count >= counts.max() - 1


def test_per_task_gives_the_rare_task_its_share() -> None:
    data = dataset([90, 10], tasks=[0, 1])
    rows = np.array(select_rows(CacheConfig(samples=20, sampling=Sampling.PER_TASK), data))
    assert ((rows < 90).sum(), (rows >= 90).sum()) == (10, 10)


@pytest.mark.parametrize("seed", range(5))
def test_per_phase_has_frames_from_every_stretch_of_an_episode(seed: int) -> None:
    # A long episode and a short one: the end of the short one is an end, too.
    data = dataset([60, 20])
    config = CacheConfig(samples=8, sampling=Sampling.PER_PHASE, seed=seed)
    rows = np.array(select_rows(config, data))
    phases = np.where(rows < 60, rows / 59, (rows - 60) / 19)
    assert np.histogram(phases, bins=8, range=(0, 1))[0] == pytest.approx(1, abs=1)
    assert np.sort(phases) == pytest.approx((np.arange(8) + 0.5) / 8, abs=0.5 / 8 + 0.02)


def test_episodes_restrict_the_choice() -> None:
    data = dataset([5, 5, 5, 5])
    rows = select_rows(CacheConfig(samples=10, episodes="0,2-2"), data)
    assert rows == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


def test_explicit_rows_come_from_a_list_or_a_file(tmp_path: Path) -> None:
    data = dataset([10])
    file = tmp_path / "rows.txt"
    file.write_text("3\n7\n\n1-2\n")
    assert select_rows(CacheConfig(indices="7,1-3"), data) == [1, 2, 3, 7]
    assert select_rows(CacheConfig(indices=str(file)), data) == [1, 2, 3, 7]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"samples": 11}, "Cannot select 11 anchors.*dataset has 10 frames.*--samples 10"),
        ({"samples": 6, "episodes": "1"}, "chosen episodes have 5 frames"),
        ({"episodes": "0-2"}, "--episodes goes beyond.*2 is too large, the last is 1"),
        ({"episodes": "one"}, "'one' is not a number"),
        ({"indices": "10"}, "--indices goes beyond.*the last is 9"),
        ({"indices": "3-"}, "'3-' is not a number"),
        ({"indices": "0", "episodes": "1"}, "contradict.*frame 0"),
    ],
)
def test_what_cannot_be_selected_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(CraftError, match=told) as caught:
        select_rows(CacheConfig(**{"samples": 1, **given}), dataset([5, 5]))
    assert caught.value.exit_code == EXIT_USAGE


def test_ranges() -> None:
    assert parse_ranges(" 4, 0-1 ,1", "--episodes", 9) == [0, 1, 4]
