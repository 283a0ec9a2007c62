"""Retention opened by hand, for a loop that is not craft's."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from craftcli import Retention, RetentionConfig
from craftcli.choices import Amp
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE, CraftError
from craftcli.policies.lerobot.batches import read_rows

CONFIG = RetentionConfig(anchor_batch_size=8)


def task_backward(student: Any, new_data: Any) -> None:
    loss, _ = student.policy.train()(student.preprocess(read_rows(new_data, [0, 1, 2, 3])))
    loss.backward()


def test_names_are_imported_when_they_are_used() -> None:
    code = (
        "import sys, craftcli; from craftcli import RetentionConfig; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unknown_name_is_an_error() -> None:
    import craftcli

    with pytest.raises(AttributeError, match="no attribute 'Retain'"):
        _ = craftcli.Retain


def test_apply_changes_the_gradients_as_it_reports(
    student: Any, new_data: Any, cache: Path
) -> None:
    with torch.no_grad():
        for parameter in student.policy.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    retention = Retention.open(cache, student, CONFIG, total_steps=10, other_student=True)
    task_backward(student, new_data)
    before = {n: p.grad.clone() for n, p in student.policy.named_parameters() if p.grad is not None}
    report = retention.apply(0)
    assert report is not None
    assert report.loss > 0
    changed = [
        n for n, p in student.policy.named_parameters() if not torch.equal(p.grad, before[n])
    ]
    assert changed
    assert retention.lam > 1.0 or report.loss < report.epsilon


def test_a_bare_policy_is_enough(student: Any, new_data: Any, cache: Path) -> None:
    how = {"total_steps": 10, "preprocess": student.preprocess}
    retention = Retention.open(str(cache), student.policy, CONFIG, **how)
    task_backward(student, new_data)
    report = retention.apply(0)
    assert report is not None
    assert report.loss < 1e-6


def test_a_bare_policy_that_is_not_the_teacher_is_refused(student: Any, cache: Path) -> None:
    with torch.no_grad():
        for parameter in student.policy.parameters():
            parameter.mul_(1.01)
    how = {"total_steps": 10, "preprocess": student.preprocess}
    with pytest.raises(CraftError) as refused:
        Retention.open(cache, student.policy, CONFIG, **how)
    assert refused.value.exit_code == EXIT_CHECK_FAILED


def test_a_bare_policy_needs_its_preprocessor(student: Any, cache: Path) -> None:
    with pytest.raises(CraftError, match="preprocessor"):
        Retention.open(cache, student.policy, CONFIG, total_steps=10)


def test_mode_none_has_nothing_to_open(student: Any, cache: Path) -> None:
    with pytest.raises(CraftError) as refused:
        Retention.open(cache, student, RetentionConfig(mode="none"), total_steps=10)
    assert refused.value.exit_code == EXIT_USAGE


def test_a_scaled_loop_gets_scaled_gradients(student: Any, new_data: Any, cache: Path) -> None:
    plain = Retention.open(cache, student, CONFIG, total_steps=10)
    task_backward(student, new_data)
    expected = plain.apply(0)
    merged = [copy.deepcopy(p.grad) for p in student.policy.parameters()]
    student.policy.zero_grad()
    scaler = GradScaler("cpu", init_scale=64.0)
    scaled = Retention.open(cache, student, CONFIG, total_steps=10, scaler=scaler)
    loss, _ = student.policy(student.preprocess(read_rows(new_data, [0, 1, 2, 3])))
    scaler.scale(loss).backward()
    report = scaled.apply(0)
    assert report is not None
    assert expected is not None
    assert report.gradients is not None
    assert expected.gradients is not None
    assert report.dot == pytest.approx(expected.dot, rel=1e-3, abs=1e-9)
    assert report.gradients.task_norm == pytest.approx(expected.gradients.task_norm, rel=1e-5)
    for parameter, gradient in zip(student.policy.parameters(), merged, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad / 64, gradient)


def test_a_sharded_policy_is_refused(student: Any, cache: Path) -> None:
    next(student.policy.parameters()).ds_id = 0  # as DeepSpeed marks what it has sharded
    with pytest.raises(CraftError, match="sharded"):
        Retention.open(cache, student, CONFIG, total_steps=10)


def test_lower_precision_is_the_loops_own(student: Any, new_data: Any, cache: Path) -> None:
    retention = Retention.open(cache, student, CONFIG, total_steps=10, amp=Amp.BF16)
    task_backward(student, new_data)
    report = retention.apply(0)
    assert report is not None
    assert 0 < report.loss < 1e-2
