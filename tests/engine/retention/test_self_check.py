"""A cache and a student that do not belong together are refused before the first step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from craftcli.config.train import TrainConfig
from craftcli.engine.retention.retention import open_retention
from craftcli.engine.retention.self_check import (
    check_identity,
    check_known,
    require_self_check,
    self_check,
)
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.policies.lerobot.identity import teacher_identity


def test_the_untouched_student_passes(student: Any, cache: Path) -> None:
    retention = open_retention(TrainConfig(anchor_batch_size=8), student, cache)
    check = self_check(retention.terms)
    assert check is not None
    assert check.drift <= 1e-9
    require_self_check(check)


def test_a_student_that_computes_something_else_is_stopped(student: Any, cache: Path) -> None:
    """Same files, other arithmetic: only running it can tell."""
    retention = open_retention(TrainConfig(anchor_batch_size=8), student, cache)
    paligemma = student.policy.model.paligemma_with_expert.paligemma
    with torch.no_grad():
        paligemma.model.multi_modal_projector.linear.bias += 0.05
    check = self_check(retention.terms)
    assert check is not None
    with pytest.raises(CraftError, match="no longer reproduces the cached outputs") as caught:
        require_self_check(check)
    assert caught.value.exit_code == EXIT_CHECK_FAILED


@pytest.mark.parametrize(
    "field", ["policy_type", "config_digest", "weights_digest", "processor_digest"]
)
def test_what_differs_is_named(teacher: Any, cache: Path, field: str) -> None:
    student = teacher_identity(teacher)
    retention: Any = open_retention(TrainConfig(anchor_batch_size=8), teacher, cache)
    other = replace(student, **{field: "0123456789abcdef"})
    with pytest.raises(CraftError, match=rf"another teacher.*{field}.*0123456789ab"):
        check_identity(retention.anchors.manifest, other, cache="c.zarr")


def test_where_the_teacher_was_loaded_from_does_not_matter(teacher: Any, cache: Path) -> None:
    retention: Any = open_retention(TrainConfig(anchor_batch_size=8), teacher, cache)
    moved = replace(teacher_identity(teacher), source="elsewhere", revision="main")
    check_identity(retention.anchors.manifest, moved, cache="c.zarr")


def test_a_cache_of_an_unknown_teacher_is_refused_for_any_student(
    teacher: Any, cache: Path
) -> None:
    retention: Any = open_retention(TrainConfig(anchor_batch_size=8), teacher, cache)
    manifest = retention.anchors.manifest
    imported = replace(manifest, teacher=replace(manifest.teacher, weights_digest=""))
    check_known(manifest, cache="c.zarr")
    with pytest.raises(CraftError, match=r"cannot be used with a policy.*imported"):
        check_known(imported, cache="c.zarr")
