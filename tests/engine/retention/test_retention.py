"""The constraint on the real policy: zero at the teacher, and never against retention."""

from pathlib import Path
from typing import Any

import pytest
import torch

from craftcli.choices import LossKind, Mode, Pooling, SurgeryScope
from craftcli.config.train import TrainConfig
from craftcli.engine.retention.retention import Retention, open_retention
from craftcli.engine.retention.terms import evaluation_mode
from craftcli.policies.lerobot.batches import read_rows


def make_retention(policy: Any, cache: Path, **settings: Any) -> Retention:
    config = TrainConfig(**{"mode": "hidden", "anchor_batch_size": 8, "steps": 10, **settings})
    return open_retention(config, policy, cache)


def measure(retention: Retention, number: int) -> torch.Tensor:
    return retention.losses(number)[Mode.HIDDEN].total


def task_backward(student: Any, data: Any, rows: list[int]) -> None:
    student.policy.train()
    student.policy(student.preprocess(read_rows(data, rows)))[0].backward()


def flat_gradient(policy: torch.nn.Module) -> torch.Tensor:
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in policy.parameters()]
    )


def drift(policy: torch.nn.Module, size: float) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(size * torch.randn_like(parameter))


@pytest.mark.parametrize("kind", list(LossKind))
def test_loss_is_zero_at_the_teachers_weights(teacher: Any, cache: Path, kind: LossKind) -> None:
    retention = make_retention(teacher, cache, loss=kind, epsilon_start=0.1)
    for number in range(4):
        assert measure(retention, number).item() <= 1e-6


@pytest.mark.parametrize("pooling", list(Pooling))
def test_loss_is_zero_for_every_pooling(
    teacher: Any, build: Any, tmp_path: Path, pooling: Pooling
) -> None:
    path = build(tmp_path / "a.zarr", kind="hidden", pooling=pooling, samples=16, layers="0,-1")
    retention = make_retention(teacher, path)
    assert measure(retention, 0).item() <= 1e-9


@pytest.mark.parametrize(("dtype", "limit"), [("float16", 1e-6), ("bfloat16", 1e-4)])
def test_loss_is_the_rounding_of_a_narrower_store(
    teacher: Any, build: Any, tmp_path: Path, dtype: str, limit: float
) -> None:
    from craftcli.choices import StoreDtype

    path = build(tmp_path / "a.zarr", kind="hidden", dtype=StoreDtype(dtype))
    drift = measure(make_retention(teacher, path), 0).item()
    assert 0 < drift < limit


def test_loss_is_not_zero_after_drift(student: Any, cache: Path) -> None:
    retention = make_retention(student, cache)
    drift(student.policy, 0.01)
    assert measure(retention, 0).item() > 1e-3


def test_dropout_is_off_for_anchors_and_back_on_after(student: Any, cache: Path) -> None:
    policy = student.policy
    policy.train()
    vision = policy.model.paligemma_with_expert.paligemma.model.vision_tower
    vision.eval()  # a part that the user holds in evaluation mode stays there
    with evaluation_mode(policy):
        assert not any(module.training for module in policy.modules())
    assert policy.training
    assert not vision.training


def test_merged_gradient_never_opposes_retention_after_projection(
    student: Any, new_data: Any, cache: Path
) -> None:
    retention = make_retention(student, cache, conflict_threshold=1.0, lambda_init=0.0)
    drift(student.policy, 0.01)
    task_backward(student, new_data, [0, 50, 100])
    task = flat_gradient(student.policy)
    student.policy.zero_grad()
    measure(retention, 0).backward()
    ret = flat_gradient(student.policy)
    student.policy.zero_grad()

    task_backward(student, new_data, [0, 50, 100])
    report = retention.apply(0)
    assert report is not None
    assert report.gradients is not None
    assert report.gradients.conflict
    merged = flat_gradient(student.policy)
    assert report.dot == pytest.approx(float(task @ ret), rel=1e-3)
    assert report.cos == pytest.approx(float(task @ ret / task.norm() / ret.norm()), rel=1e-3)
    # Projected with λ = 0: what is left has no part along the retention gradient.
    assert abs(float(merged @ ret / merged.norm() / ret.norm())) < 1e-4


def test_gradients_are_the_weighted_sum_without_conflict(
    student: Any, new_data: Any, cache: Path
) -> None:
    retention = make_retention(student, cache, surgery=SurgeryScope.NONE, lambda_init=0.7)
    drift(student.policy, 0.01)
    task_backward(student, new_data, [3, 4])
    task = flat_gradient(student.policy)
    student.policy.zero_grad()
    measure(retention, 0).backward()
    ret = flat_gradient(student.policy)
    student.policy.zero_grad()
    task_backward(student, new_data, [3, 4])
    retention.apply(0)
    torch.testing.assert_close(flat_gradient(student.policy), task + 0.7 * ret)


def test_only_every_kth_step_has_a_turn(student: Any, new_data: Any, cache: Path) -> None:
    retention = make_retention(student, cache, retention_every=3)
    turns = []
    for step in range(7):
        task_backward(student, new_data, [step])
        turns.append(retention.apply(step) is not None)
    assert turns == [True, False, False, True, False, False, True]


def test_lambda_follows_the_violation_and_survives_saving(
    student: Any, new_data: Any, cache: Path
) -> None:
    retention = make_retention(student, cache, lambda_lr=2.0, epsilon_start=0.02)
    drift(student.policy, 0.01)
    task_backward(student, new_data, [0])
    report = retention.apply(0)
    assert report is not None
    assert report.lam == 1.0
    assert report.violated
    assert retention.lam == pytest.approx(1.0 + 2.0 * (report.loss / 0.02 - 1))
    other = make_retention(student, cache)
    other.load_state_dict(retention.state_dict())
    assert other.lam == retention.lam
