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


def reach_of(student: Any, cache: Path, data: Any) -> Any:
    retention = open_retention(TrainConfig(anchor_batch_size=4), student, cache)
    batch = student.preprocess(read_rows(data, [0, 1]))
    return find_reach(student.policy, student.adapter, retention, batch)


def test_behind_the_last_layer_lie_the_norm_and_the_head(
    student: Any, cache: Path, new_data: Any
) -> None:
    reach = reach_of(student, cache, new_data)
    assert reach.downstream == {HEAD, LANGUAGE + "norm.weight"}
    assert reach.retained == reach.trainable - reach.downstream
    assert "free to drift" in describe_downstream(reach, frozen=False)


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
