"""Held-out anchors: which they are, and that retention measures them without training on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from craftcli.cache.reading.reader import CacheReader
from craftcli.config.train import TrainConfig
from craftcli.engine.method.held_out import EVERY
from craftcli.engine.method.multiplier import relative_violation
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.engine.retention.held_out_rows import split_rows
from craftcli.engine.retention.retention import Retention, open_retention
from craftcli.errors import EXIT_USAGE, CraftError


@pytest.fixture(scope="module")
def anchors(build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("held-out") / "a.zarr", samples=96)


def anchor_set(path: Path, **changed: Any) -> AnchorSet:
    settings = {"batch_size": 8, "seed": 0, "held_out_share": 0.2, **changed}
    return AnchorSet(CacheReader.open(path), **settings)


def walked(walk: Any, batches: int) -> set[int]:
    return {int(row) for number in range(batches) for row in walk.rows(number)}


def test_a_share_is_in_no_batch(anchors: Path) -> None:
    found = anchor_set(anchors)
    assert found.held_out is not None
    assert (len(found), len(found.held_out)) == (77, 19)
    trained, held_out = walked(found.walk, 20), walked(found.held_out, 5)
    assert trained.isdisjoint(held_out)
    assert trained | held_out == set(range(96))


def test_the_seed_alone_decides_which(anchors: Path) -> None:
    reader, rows = CacheReader.open(anchors), np.arange(96)
    one, same, other = (split_rows(reader, rows, share=0.2, seed=s) for s in (0, 0, 1))
    assert np.array_equal(one.held_out, same.held_out)
    assert not np.array_equal(one.held_out, other.held_out)
    # The size of a batch changes with the number of processes, and must not move the split.
    wide = anchor_set(anchors, batch_size=16)
    assert wide.held_out is not None
    assert walked(wide.held_out, 5) == {int(row) for row in one.held_out}


def test_without_a_share_nothing_changes(anchors: Path) -> None:
    plain = AnchorSet(CacheReader.open(anchors), batch_size=8, seed=0)
    assert plain.held_out is None
    assert walked(plain.walk, 12) == set(range(96))
    with pytest.raises(RuntimeError, match="without held-out"):
        plain.held_out_batch(0, torch.device("cpu"))


def test_frames_as_they_are_stay_in_training(build: Callable[..., Path], tmp_path: Path) -> None:
    path = build(tmp_path / "a.zarr", samples=16, augment=5)
    found = anchor_set(path)
    assert found.held_out is not None
    assert min(walked(found.held_out, 5)) >= 16
    assert set(range(16)) <= walked(found.walk, 20)


def test_too_few_anchors_are_refused(cache: Path) -> None:
    with pytest.raises(CraftError, match="64 usable ones are needed, and it has 32") as error:
        anchor_set(cache, held_out_share=0.1)
    assert error.value.exit_code == EXIT_USAGE
    assert "--augment" in str(error.value.fix)


def retention(student: Any, path: Path, **changed: Any) -> Retention:
    settings = {"anchor_batch_size": 8, "steps": 40, "held_out_share": 0.2, **changed}
    return open_retention(TrainConfig(**settings), student, path)


def drift(policy: torch.nn.Module) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))


def test_they_are_measured_now_and_then_without_a_gradient(student: Any, anchors: Path) -> None:
    held = retention(student, anchors)
    drift(student.policy)
    reports = [held.apply(step) for step in range(EVERY + 1)]
    measured = [step for step, r in enumerate(reports) if r and r.held_out is not None]
    assert measured == [0, EVERY]
    first = reports[0]
    assert first is not None
    with torch.no_grad():
        losses = held.terms.held_out_losses(0)
    assert first.held_out == pytest.approx(sum(x.total.item() for x in losses.values()) / 2)


def gradient_of(held: Retention, policy: torch.nn.Module) -> list[torch.Tensor]:
    policy.zero_grad()
    held.apply(0)
    return [p.grad.clone() for p in policy.parameters() if p.grad is not None]


def test_measuring_changes_no_gradient(student: Any, anchors: Path) -> None:
    held, plain = (retention(student, anchors, held_out_share=s) for s in (0.2, 0.0))
    assert isinstance(held.anchors, AnchorSet)
    assert isinstance(plain.anchors, AnchorSet)
    plain.anchors.walk = held.anchors.walk
    drift(student.policy)
    own, without = (gradient_of(each, student.policy) for each in (held, plain))
    assert own
    assert all(torch.equal(a, b) for a, b in zip(own, without, strict=True))


def give_task_gradients(policy: torch.nn.Module) -> None:
    """Gradients so large that they do not bound λ."""
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)


def test_lambda_sees_the_larger_loss(student: Any, anchors: Path) -> None:
    held = retention(student, anchors, epsilon_start=0.001, lambda_lr=0.1)
    give_task_gradients(student.policy)
    report = held.apply(0)
    assert report is not None
    assert report.held_out == pytest.approx(0, abs=1e-6)
    fallen = 1 / (1 + 0.1)
    assert held.lam == pytest.approx(fallen, abs=1e-6)
    drift(student.policy)
    give_task_gradients(student.policy)
    report = held.apply(EVERY)
    assert report is not None
    assert report.held_out is not None
    violation = relative_violation(max(report.loss, report.held_out), 0.001)
    assert violation > 0
    assert held.lam == pytest.approx(fallen + 0.1 * violation, abs=1e-6)


@pytest.mark.parametrize(("mode", "measures"), [("replay", True), ("ewc", False)])
def test_modes_with_labels(student: Any, anchors: Path, mode: str, measures: bool) -> None:
    held = retention(student, anchors, mode=mode, fisher_samples=4)
    report = held.apply(0)
    assert report is not None
    assert (report.held_out is not None) == measures


def test_one_constraint_a_mode_sees_its_own(student: Any, anchors: Path) -> None:
    held = retention(
        student, anchors, mode="hidden+action+l2sp", constraints="each", epsilon_start=0.02
    )
    drift(student.policy)
    held.apply(0)
    state = held.state_dict()
    assert {name for name, s in state.items() if "held_out" in s} == {"hidden", "action"}
    assert state["hidden"]["held_out"]["last"] != state["action"]["held_out"]["last"]
