"""The statistics of a policy's normaliser: what is drawn from them, and what they cannot do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny.act import ACT, STATE_ONLY
from tiny.diffusion import policy as diffusion_policy
from tiny.world import save

from craftcli.config.parsing import parse_fixed
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.input_statistics import (
    WIDE,
    InputStatistics,
    VectorStatistics,
    _vector,
    input_statistics,
)

SIZE = 3
NUMBERS = st.lists(st.floats(-5, 5), min_size=SIZE, max_size=SIZE)


def statistics(low: list[float], width: list[float], **changes: Any) -> InputStatistics:
    one = VectorStatistics(
        low=np.array(low), high=np.array(low) + np.abs(width), deviation=np.abs(width) / 4
    )
    shifted = replace(one, low=one.low - 1)
    values: dict[str, Any] = {
        "vectors": {"state": one, "copy": one, "other": shifted},
        "missing": (),
        "cameras": (),
        "histories": {},
        "action_shape": (2,),
    }
    return InputStatistics(**values | changes)


@given(NUMBERS, NUMBERS, st.integers(0, 2**32))
def test_draws_stay_in_range_and_copies_are_copies(
    low: list[float], width: list[float], seed: int
) -> None:
    known = statistics(low, width)
    drawn, again = (known.draw_uniform(np.random.default_rng(seed)) for _ in range(2))
    for name, vector in known.vectors.items():
        np.testing.assert_array_equal(drawn[name], again[name])
        assert (drawn[name] >= vector.low - 1e-5).all()
        assert (drawn[name] <= vector.high + 1e-5).all()
    np.testing.assert_array_equal(drawn["state"], drawn["copy"])


@given(NUMBERS, NUMBERS, st.integers(0, 2**32))
def test_numbers_without_spread_get_no_noise(
    low: list[float], width: list[float], seed: int
) -> None:
    known = statistics(low, [*width[:2], 0.0])
    noise = known.draw_noise(np.random.default_rng(seed))
    assert all(values[2] == 0 for values in noise.values())
    np.testing.assert_array_equal(noise["state"], noise["copy"])


def test_a_history_repeats_one_state() -> None:
    known = statistics([0.0] * SIZE, [1.0] * SIZE, histories={"state": 2})
    drawn = known.draw_uniform(np.random.default_rng(0))
    assert (drawn["state"].shape, drawn["other"].shape) == ((2, SIZE), (SIZE,))
    np.testing.assert_array_equal(drawn["state"][0], drawn["state"][1])


def test_what_is_missing_is_made_up_from_what_there_is() -> None:
    mean, std = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0])
    vector = _vector({"mean": mean, "std": std}, (2,))
    assert vector is not None
    np.testing.assert_allclose(vector.low, [1 - WIDE * 0.5, 2])
    assert vector.moves.tolist() == [True, False]
    ranged = _vector({"min": torch.zeros(2), "max": torch.ones(2)}, (2,))
    assert ranged is not None
    np.testing.assert_allclose(ranged.deviation, 1 / np.sqrt(12))
    assert _vector({"mean": mean}, (2,)) is None
    assert _vector({"mean": torch.zeros(3, 1, 1), "std": torch.ones(3, 1, 1)}, (2,)) is None


def test_real_policies_are_read(tmp_path: Path) -> None:
    states = input_statistics(load_checkpoint(str(STATE_ONLY.make(tmp_path / "a")), device="cpu"))
    assert list(states.vectors) == ["observation.state", "observation.environment_state"]
    assert (states.cameras, states.histories, states.missing) == ((), {}, ())
    assert states.action_shape == (4, 3)
    folder = save(tmp_path / "d", diffusion_policy(cameras=0))
    history = input_statistics(load_checkpoint(str(folder), device="cpu"))
    assert set(history.histories.values()) == {2}
    seeing = input_statistics(load_checkpoint(str(ACT.make(tmp_path / "i")), device="cpu"))
    assert seeing.cameras == ("observation.images.front", "observation.images.wrist")
    with pytest.raises(CraftError, match="--from-statistics does not work") as caught:
        seeing.require_vectors_only(option="--from-statistics")
    assert "observation.images.front" in caught.value.why


def test_a_datasets_file_takes_the_place_of_the_normaliser(tmp_path: Path) -> None:
    policy = load_checkpoint(str(STATE_ONLY.make(tmp_path / "policy")), device="cpu")
    names = list(input_statistics(policy).vectors)
    sizes = {name: policy.policy.config.input_features[name].shape[0] for name in names}
    # The task's number, one-hot, never moves within a task.
    ranges = {n: {"min": [7.0] * size, "max": [7.0] * size} for n, size in sizes.items()}
    file = tmp_path / "stats.json"
    file.write_text(json.dumps(ranges))
    found = input_statistics(policy, file)
    drawn = found.draw_uniform(np.random.default_rng(0))
    assert {name: values.tolist() for name, values in drawn.items()} == {
        name: [7.0] * size for name, size in sizes.items()
    }
    assert found.digest() != input_statistics(policy).digest()

    file.write_text(json.dumps({names[0]: ranges[names[0]]}))
    with pytest.raises(CraftError) as caught:
        input_statistics(policy, file).require_vectors_only(option="--from-statistics")
    assert f"{file} has no statistics of {names[1]}" in caught.value.why
    file.write_text("[1, 2]")
    with pytest.raises(CraftError, match="Cannot read the statistics") as caught:
        input_statistics(policy, file)
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("known", "named"),
    [
        (statistics([0.0] * SIZE, [1.0] * SIZE, missing=("observation.force",)), "force"),
        (statistics([0.0] * SIZE, [0.0] * SIZE), "none of its numbers varied"),
        (statistics([0.0] * SIZE, [1.0] * SIZE, vectors={}), "no vector"),
    ],
)
def test_a_policy_whose_inputs_cannot_be_varied_is_refused(
    known: InputStatistics, named: str
) -> None:
    with pytest.raises(CraftError, match="--augment does not work for this policy") as caught:
        known.require_variable(option="--augment")
    assert named in caught.value.why
    assert caught.value.exit_code == EXIT_USAGE


def test_an_input_without_statistics_can_be_left_alone() -> None:
    known = statistics([0.0] * SIZE, [1.0] * SIZE, missing=("observation.force",))
    known.with_fixed({"observation.force": None}).require_variable(option="--augment")
    statistics([0.0] * SIZE, [0.0] * SIZE, cameras=("top",)).require_variable(option="--augment")


def test_fixed_numbers_do_not_move_in_any_copy() -> None:
    known = statistics([0.0] * SIZE, [1.0] * SIZE).with_fixed({"copy": (1,), "other": None})
    moves = {name: vector.moves.tolist() for name, vector in known.vectors.items()}
    assert moves == {
        "state": [True, False, True],
        "copy": [True, False, True],
        "other": [False] * SIZE,
    }
    assert known.settings() == {"fixed": "state:1,copy:1,other:0,1,2"}
    assert known.digest() == statistics([0.0] * SIZE, [1.0] * SIZE).digest()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a", {"a": None}),
        ("a:1", {"a": (1,)}),
        ("a:1,3-5, b,c:0", {"a": (1, 3, 4, 5), "b": None, "c": (0,)}),
    ],
)
def test_fixed_numbers_are_read(text: str, meant: dict[str, Any]) -> None:
    assert parse_fixed(text) == meant


@pytest.mark.parametrize("text", ["", "1,2", "a:", "a:x", "a:3-1", "a,a:1", "a,1", ":3", "a:1,,b"])
def test_fixed_numbers_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"has|names"):
        parse_fixed(text)
