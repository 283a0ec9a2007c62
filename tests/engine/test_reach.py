"""Autograd tells what retention holds and what stays free behind it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from craftcli.config import TrainConfig
from craftcli.engine.opening import open_retention
from craftcli.engine.reach import describe_downstream, find_reach, freeze, require_reach
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.policies.data import read_rows

LANGUAGE = "model.paligemma_with_expert.paligemma.model.language_model."
HEAD = "model.paligemma_with_expert.paligemma.lm_head.weight"


def reach_of(student: Any, cache: Path, data: Any, mode: str = "hidden", **settings: Any) -> Any:
    config = TrainConfig(mode=mode, anchor_batch_size=4, **settings)
    retention = open_retention(config, student, cache)
    batch = student.preprocess(read_rows(data, [0, 1]))
    return find_reach(student.policy, student.adapter, retention, batch)


def test_behind_the_last_layer_lie_the_norm_and_the_head(
    student: Any, cache: Path, new_data: Any
) -> None:
    reach = reach_of(student, cache, new_data)
    assert reach.downstream == {HEAD, LANGUAGE + "norm.weight"}
    assert reach.retained == reach.trainable - reach.downstream
    assert reach.free == reach.downstream
    assert describe_downstream(reach, frozen=False) == (
        "free to drift behind the deepest retained layer: lm_head.weight, norm.weight"
    )


def test_what_lies_behind_is_not_free_when_the_output_is_held_too(
    student: Any, cache: Path, new_data: Any
) -> None:
    reach = reach_of(student, cache, new_data, "hidden+action")
    assert reach.downstream == {HEAD, LANGUAGE + "norm.weight"}
    assert reach.free == frozenset()
    assert reach.retained == reach.trainable
    assert describe_downstream(reach, frozen=False).startswith("nothing trainable is free to drift")
    assert describe_downstream(reach, frozen=True) == (
        "frozen behind the deepest retained layer: lm_head.weight, norm.weight"
    )


def test_a_head_that_is_tied_to_what_is_held_is_free_all_the_same(
    student: Any, cache: Path, new_data: Any
) -> None:
    """The hidden states reach the embedding, and say nothing of what the head makes of them."""
    paligemma = student.policy.model.paligemma_with_expert.paligemma
    paligemma.lm_head.weight = paligemma.model.language_model.embed_tokens.weight
    alone = reach_of(student, cache, new_data, other_student=True)
    assert HEAD in alone.retained  # the name that both have now
    assert HEAD in alone.free
    both = reach_of(student, cache, new_data, "hidden+action", other_student=True)
    assert HEAD in both.downstream
    assert both.free == frozenset()


def test_behind_an_early_layer_lie_all_the_later_ones(
    student: Any, build: Any, new_data: Any, tmp_path: Path
) -> None:
    reach = reach_of(student, build(tmp_path / "a.zarr", layers="1", samples=8), new_data)
    behind = (LANGUAGE + "layers.2", LANGUAGE + "layers.3")
    later = {name for name in reach.trainable if name.startswith(behind)}
    assert reach.downstream == later | {HEAD, LANGUAGE + "norm.weight"}
    assert not reach.retained & reach.downstream


def test_looking_changes_nothing(student: Any, teacher: Any, cache: Path, new_data: Any) -> None:
    reach_of(student, cache, new_data)
    for (name, p), (_, q) in zip(
        student.policy.named_parameters(), teacher.policy.named_parameters(), strict=True
    ):
        assert p.grad is None, name
        assert torch.equal(p, q), name


def test_frozen_parameters_leave_the_trainable_ones(
    student: Any, cache: Path, new_data: Any
) -> None:
    freeze(student.policy, frozenset({HEAD}))
    reach = reach_of(student, cache, new_data)
    assert HEAD not in reach.trainable
    assert reach.downstream == {LANGUAGE + "norm.weight"}


def test_retention_that_reaches_nothing_is_refused(
    student: Any, cache: Path, new_data: Any
) -> None:
    """As when only an action head is trained."""
    freeze(student.policy, frozenset(n for n, _ in student.policy.named_parameters() if n != HEAD))
    head_only = reach_of(student, cache, new_data)
    assert not head_only.retained
    with pytest.raises(CraftError, match="reaches none of the 1 trainable") as caught:
        require_reach(head_only)
    assert caught.value.exit_code == EXIT_CHECK_FAILED
