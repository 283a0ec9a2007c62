"""One training step: what it updates, what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from craftcli.choices import Mode
from craftcli.config import TrainConfig
from craftcli.engine.session import open_retention
from craftcli.engine.step import train_step
from craftcli.engine.trainer import Trainer
from craftcli.errors import CraftError
from craftcli.policies.data import read_rows


def weights(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def make_trainer(student: Any, data: Any, cache: Path, **settings: Any) -> Trainer:
    config = TrainConfig(
        **{"steps": 4, "batch_size": 4, "anchor_batch_size": 4, "retention_every": 1, **settings}
    )
    retention = None
    if config.mode is not Mode.NONE:
        retention = open_retention(config, student, cache)
    return Trainer(config, student, data, retention, output=Path("unused"))


def test_every_trained_tensor_moves(student: Any, new_data: Any, cache: Path) -> None:
    before = weights(student.policy)
    for report in make_trainer(student, new_data, cache).steps():
        assert report.retention is not None
    after = weights(student.policy)
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_the_same_seed_gives_the_same_run(new_data: Any, cache: Path) -> None:
    from craftcli.engine.session import open_policy

    runs = []
    for _ in range(2):
        student = open_policy(TrainConfig(device="cpu"))
        reports = list(make_trainer(student, new_data, cache).steps())
        runs.append(([(r.loss, r.retention) for r in reports], weights(student.policy)))
    assert runs[0][0] == runs[1][0]
    for name, tensor in runs[0][1].items():
        assert torch.equal(tensor, runs[1][1][name])


def test_plain_fine_tuning_is_the_policys_own_training(
    student: Any, new_data: Any, cache: Path
) -> None:
    """Mode none: the same weights as a loop written with nothing but torch."""
    from craftcli.engine.session import open_policy

    reference = open_policy(TrainConfig(device="cpu"))
    trainer = make_trainer(student, new_data, cache, mode=Mode.NONE)
    list(trainer.steps())

    twin = make_trainer(reference, new_data, cache, mode=Mode.NONE)
    optimizer = torch.optim.AdamW(
        reference.policy.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01
    )
    schedule = reference.policy.config.get_scheduler_preset().build(optimizer, 4)
    batches = twin.batches()
    reference.policy.train()
    for _ in range(4):
        loss, _ = reference.policy(next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    expected = weights(reference.policy)
    for name, tensor in weights(student.policy).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("where", ["task", "anchors"])
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(
    student: Any, new_data: Any, cache: Path, where: str
) -> None:
    trainer = make_trainer(student, new_data, cache)
    before = weights(student.policy)
    batch = student.preprocess(read_rows(new_data, [0, 1]))
    retention = trainer._retention
    assert retention is not None
    if where == "task":
        batch["observation.images.top"][0] = torch.nan
    else:
        original = retention.student_states

        def broken(rows: Any) -> Any:
            return {name: state * torch.inf for name, state in original(rows).items()}

        retention.student_states = broken  # type: ignore[method-assign]
    with pytest.raises(CraftError, match="stopped at step 1"):
        train_step(
            0,
            batch,
            policy=student.policy,
            optimizer=trainer._optimizer,
            scheduler=trainer._scheduler,
            retention=retention,
            clip_norm=1.0,
            data_s=0.0,
        )
    after = weights(student.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert retention.lam == 1.0 or where == "task"


def test_the_gradient_is_clipped_once_after_merging(
    student: Any, new_data: Any, cache: Path
) -> None:
    trainer = make_trainer(student, new_data, cache)
    batch = student.preprocess(read_rows(new_data, [0, 1]))
    seen = []
    step = trainer._optimizer.step

    def spy() -> None:
        grads = [p.grad for p in student.policy.parameters() if p.grad is not None]
        seen.append(torch.nn.utils.get_total_norm(grads).item())
        step()

    trainer._optimizer.step = spy
    report = train_step(
        0,
        batch,
        policy=student.policy,
        optimizer=trainer._optimizer,
        scheduler=None,
        retention=trainer._retention,
        clip_norm=0.5,
        data_s=0.0,
    )
    assert report.grad_norm > 0.5
    assert seen == [pytest.approx(0.5, rel=1e-3)]
