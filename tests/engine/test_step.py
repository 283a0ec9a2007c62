"""One training step: what it updates, what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny.steps import make_trainer, one_step

from craftcli.config.train import TrainConfig
from craftcli.engine.retention.imitation import Imitation
from craftcli.policies.lerobot.batches import TaskBatches, read_rows
from craftcli.sources import open_policy


def weights(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def test_every_trained_tensor_moves(student: Any, new_data: Any, cache: Path) -> None:
    """Pitfall 16: the action head too, which no retention gradient reaches."""
    before = weights(student.policy)
    for report in make_trainer(student, new_data, cache).steps():
        assert report.retention is not None
    after = weights(student.policy)
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_the_same_seed_gives_the_same_run(new_data: Any, cache: Path) -> None:
    runs = []
    for _ in range(2):
        student = open_policy(TrainConfig(device="cpu"))
        reports = list(make_trainer(student, new_data, cache).steps())
        runs.append(([(r.loss, r.retention) for r in reports], weights(student.policy)))
    assert runs[0][0] == runs[1][0]
    for name, tensor in runs[0][1].items():
        assert torch.equal(tensor, runs[1][1][name])


@pytest.mark.parametrize("where", ["task", "anchors"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_reported(
    student: Any, new_data: Any, cache: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(student, new_data, cache)
    before = weights(student.policy)
    batch = student.preprocess(read_rows(new_data, [0, 1]))
    if where == "task":
        batch["observation.images.top"][0] = torch.nan
    else:
        states = Imitation.states
        monkeypatch.setattr(
            Imitation,
            "states",
            lambda self, f: {name: s * torch.inf for name, s in states(self, f).items()},
        )
    report = one_step(trainer, [batch])
    assert report.skipped
    after = weights(student.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.retention is not None
    assert trainer.retention.lam == 1.0
    assert trainer.scheduler.last_epoch == 0
    assert all(p.grad is None for p in student.policy.parameters())


def test_the_gradient_is_clipped_once_after_merging(
    student: Any, new_data: Any, cache: Path
) -> None:
    trainer = make_trainer(student, new_data, cache)
    batch = student.preprocess(read_rows(new_data, [0, 1]))
    seen = []
    step = trainer.optimizer.step

    def spy() -> None:
        grads = [p.grad for p in student.policy.parameters() if p.grad is not None]
        seen.append(torch.nn.utils.get_total_norm(grads).item())
        step()

    trainer.optimizer.step = spy
    # Without the scheduler, because torch's warns of a replaced step.
    report = one_step(trainer, [batch], clip_norm=0.5, scheduler=None)
    assert report.grad_norm > 0.5
    assert seen == [pytest.approx(0.5, rel=1e-3)]


def test_plain_fine_tuning_is_lerobots_own_training(
    student: Any, new_data: Any, cache: Path
) -> None:
    """Mode none: the same weights as LeRobot's update function gives on the same batches."""
    from accelerate import Accelerator
    from lerobot.scripts.lerobot_train import update_policy
    from lerobot.utils.logging_utils import AverageMeter, MetricsTracker

    reference = open_policy(TrainConfig(device="cpu"))
    trainer = make_trainer(student, new_data, cache, mode="none")
    list(trainer.steps())

    twin = make_trainer(reference, new_data, cache, mode="none")
    meters = {name: AverageMeter(name) for name in ("loss", "grad_norm", "lr", "update_s")}
    tracker = MetricsTracker(4, 100, 10, meters, initial_step=0)
    batches = iter(TaskBatches(new_data, batch_size=4, seed=0, workers=0))
    for _ in range(4):
        update_policy(
            tracker,
            reference.policy,
            reference.preprocess(next(batches)),
            twin.optimizer,
            1.0,
            Accelerator(cpu=True),
            lr_scheduler=twin.scheduler,
        )
    expected = weights(reference.policy)
    for name, tensor in weights(student.policy).items():
        assert torch.equal(tensor, expected[name]), name
