"""Draws by weights: exact shares, every frame as often as the others, and any place again."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from craftcli.errors import CraftError
from craftcli.policies.lerobot.weighted_sampler import WeightedSampler, apportion

FRAMES = [np.arange(0, 30), np.arange(100, 110), np.arange(200, 203)]
SHARES = (0.5, 0.3, 0.2)


def sampler(seed: int = 0, shares: tuple[float, ...] = SHARES) -> WeightedSampler:
    return WeightedSampler(FRAMES, shares=shares, seed=seed)


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    total=st.integers(6, 10_000),
)
def test_parts_add_up_and_are_within_one_of_their_shares(weights: list[float], total: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    parts = apportion(total, shares)
    assert sum(parts) == total
    assert min(parts) >= 1
    if min(share * total for share in shares) >= 1:
        for part, share in zip(parts, shares, strict=True):
            assert abs(part - share * total) <= 1 + 1e-6


def test_more_datasets_than_samples_are_refused() -> None:
    with pytest.raises(CraftError, match="cannot be shared by 3"):
        apportion(2, SHARES)


def test_an_epoch_has_the_shares_and_goes_on_within_each_dataset() -> None:
    drawn = sampler()
    assert drawn.quotas == [21, 13, 9]
    seen: Counter[int] = Counter()
    for _ in range(30):
        epoch = list(drawn)
        assert len(epoch) == len(drawn) == 43
        assert [sum(frame in own for frame in epoch) for own in FRAMES] == drawn.quotas
        seen.update(epoch)
    for own, quota in zip(FRAMES, drawn.quotas, strict=True):
        times = [seen[int(frame)] for frame in own]
        assert max(times) - min(times) <= 1
        assert sum(times) == 30 * quota


def test_the_order_depends_on_the_seed_and_the_epoch_alone() -> None:
    first, again, other = sampler(), sampler(), sampler(seed=1)
    epochs = [list(first) for _ in range(3)]
    assert [list(again) for _ in range(3)] == epochs
    assert epochs[0] != epochs[1]
    assert list(other) != epochs[0]


def test_it_continues_at_any_place() -> None:
    whole = sampler()
    epochs = [list(whole) for _ in range(3)]
    resumed = sampler()
    resumed.load_state_dict({"epoch": 1, "start_index": 7})
    assert list(resumed) == epochs[1][7:]
    assert list(resumed) == epochs[2]
