"""LeRobot's side of a training run: its optimizer and how the learning rate moves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from craftcli.choices import LrSchedule
from craftcli.config.train import TrainConfig
from craftcli.policies.lerobot.training import optimizer_and_scheduler, pipeline_config

STEPS = 20


def rates(schedule: LrSchedule, student: Any, data: Any, output: Path) -> list[float]:
    """The learning rate of every step."""
    config = TrainConfig(steps=STEPS, lr=1e-3, lr_schedule=schedule, device="cpu")
    pipeline = pipeline_config(config, student, data, output)
    optimizer, scheduler = optimizer_and_scheduler(pipeline, student.policy)
    seen = []
    for _ in range(STEPS):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return seen


def test_the_learning_rate_moves_as_asked(teacher: Any, new_data: Any, tmp_path: Path) -> None:
    constant = rates(LrSchedule.CONSTANT, teacher, new_data, tmp_path)
    assert constant == [1e-3] * STEPS
    cosine = rates(LrSchedule.COSINE, teacher, new_data, tmp_path)
    assert cosine[0] == 1e-3
    assert cosine[STEPS // 2] == pytest.approx(5e-4)
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[-1] < 1e-5
    preset = rates(LrSchedule.PRESET, teacher, new_data, tmp_path)
    own = teacher.policy.config.get_scheduler_preset()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    own.peak_lr, own.decay_lr = 1e-3, own.decay_lr * 1e-3 / own.peak_lr
    expected = own.build(optimizer, STEPS).lr_lambdas[0]
    assert preset == pytest.approx([1e-3 * expected(step) for step in range(STEPS)])
    assert preset not in (constant, cosine)


def test_lerobot_train_takes_the_learning_rate_of_the_run(
    teacher: Any, new_data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = teacher.policy.config.optimizer_lr
    config = TrainConfig(steps=STEPS, device="cpu", lr=before * 3)
    pipeline = pipeline_config(config, teacher, new_data, tmp_path / "run")
    ours, _ = optimizer_and_scheduler(pipeline, teacher.policy)
    # What lerobot-train does with the settings that it reads.
    monkeypatch.setattr("sys.argv", ["lerobot-train"])
    monkeypatch.setattr(pipeline.policy, "push_to_hub", False)
    pipeline.validate()
    theirs, _ = optimizer_and_scheduler(pipeline, teacher.policy)
    assert pipeline.optimizer.lr == pipeline.scheduler.peak_lr == before * 3
    assert [group["lr"] for group in ours.param_groups] == [
        group["lr"] for group in theirs.param_groups
    ]
    # The policy's own configuration, which checkpoints are saved with, is not touched.
    assert teacher.policy.config.optimizer_lr == before
