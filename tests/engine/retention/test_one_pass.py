"""Steps that project nothing: one backward pass gives the gradient that two passes give."""

from pathlib import Path
from typing import Any

import pytest
import torch

from craftcli.config.train import TrainConfig
from craftcli.engine.retention.retention import MEASURE_EVERY, Retention, open_retention
from craftcli.policies.lerobot.batches import read_rows

STEP = MEASURE_EVERY + 2


def retention_of(student: Any, cache: Path, **settings: Any) -> Retention:
    config = {"mode": "hidden", "anchor_batch_size": 8, "steps": 100, "epsilon_start": 10.0}
    return open_retention(TrainConfig(**{**config, **settings}), student, cache)


def drift(policy: torch.nn.Module) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))


def tasks(student: Any, data: Any, count: int = 1) -> list[Any]:
    student.policy.train()
    batches = [student.preprocess(read_rows(data, [3 * n, 3 * n + 1])) for n in range(count)]
    return [lambda batch=batch: student.policy(batch)[0] for batch in batches]


def gradients(policy: torch.nn.Module) -> list[torch.Tensor | None]:
    found = [None if p.grad is None else p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"lambda_init": 3.0},
        {"lambda_init": 3.0, "merge": "task_priority"},
        {"merge": "equal"},
        {"mode": "hidden+l2sp", "constraints": "each", "epsilon_start": 10.0},
        {"grad_accum": 2, "held_out_share": 0.0},
        {"surgery": "none", "epsilon_start": 0.0},
    ],
    ids=str,
)
def test_one_pass_gives_the_gradient_of_two(
    student: Any, new_data: Any, cache: Path, settings: dict[str, Any]
) -> None:
    two = retention_of(student, cache, **settings)
    one = retention_of(student, cache, **settings)
    drift(student.policy)
    works = tasks(student, new_data, one.config.grad_accum)
    loss = two.execution.accumulate(works)
    expected = two.merge(STEP)
    merged = gradients(student.policy)
    joined_loss, losses = one.join(STEP, works)
    report = one.report(STEP, losses, losses.values.tolist())
    joined = gradients(student.policy)
    assert expected is not None
    assert expected.gradients is not None
    assert report.gradients is None
    torch.testing.assert_close(joined_loss, loss)
    assert report.losses == pytest.approx(expected.losses, rel=1e-5)
    assert any(g is not None and g.abs().max() > 0 for g in joined)
    for a, b in zip(joined, merged, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    one.update(STEP, report)
    two.update(STEP, expected)
    assert one.lam == pytest.approx(two.lam, rel=1e-5)


def turned(retention: Retention, loss: float) -> Retention:
    """The retention after a turn with this L_ret."""
    for constraint in retention.state_dict():
        state = retention.state_dict()
        state[constraint]["violated"] = loss > 10.0
        retention.load_state_dict(state)
    return retention


def test_steps_are_joined_while_the_budget_holds(student: Any, cache: Path) -> None:
    held, violated = (turned(retention_of(student, cache), loss) for loss in (1.0, 11.0))
    joined = [step for step in range(40) if held.joins(step)]
    apart = {*range(MEASURE_EVERY), *range(MEASURE_EVERY - 1, 40, MEASURE_EVERY)}
    assert joined == [step for step in range(40) if step not in apart]
    assert not any(violated.joins(step) for step in range(40))
    assert not retention_of(student, cache).joins(STEP)  # no turn yet


@pytest.mark.parametrize(
    ("settings", "joins"),
    [
        ({"project_when": "conflict"}, False),
        ({"project_when": "conflict", "surgery": "none"}, True),
        ({"merge": "upgrad"}, False),
        ({"retention_every": 2}, False),
        ({"surgery": "per_layer"}, True),
    ],
    ids=str,
)
def test_what_needs_both_gradients_takes_two_passes(
    student: Any, cache: Path, settings: dict[str, Any], joins: bool
) -> None:
    assert turned(retention_of(student, cache, **settings), 1.0).joins(STEP) is joins


def test_a_turn_above_the_budget_brings_two_passes_back(
    student: Any, new_data: Any, cache: Path
) -> None:
    retention = turned(retention_of(student, cache, epsilon_start=1e-6), 1.0)
    assert retention.joins(STEP)
    drift(student.policy)
    _, losses = retention.join(STEP, tasks(student, new_data))
    report = retention.report(STEP, losses, losses.values.tolist())
    assert report.violated
    retention.update(STEP, report)
    assert not retention.joins(STEP + 1)
