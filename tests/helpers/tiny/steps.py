"""Single training steps, with all that a run has around them."""

from pathlib import Path
from typing import Any

from craftcli.config.train import TrainConfig
from craftcli.engine.metrics import StepReport
from craftcli.engine.retention.opening import open_terms
from craftcli.engine.step import train_step
from craftcli.engine.trainer import Trainer


def make_trainer(student: Any, data: Any, cache: Path, **settings: Any) -> Trainer:
    """The trainer of a short run, with a cache unless the mode is none."""
    small = {"steps": 4, "batch_size": 4, "anchor_batch_size": 4, "device": "cpu"}
    config = TrainConfig(**{**small, "mode": "hidden", **settings})
    terms = open_terms(config, student, cache) if config.retains else None
    return Trainer(config, student, data, terms, output=Path("unused"))


def one_step(trainer: Trainer, batches: list[Any], step: int = 0, **changed: Any) -> StepReport:
    """Take one step of the trainer with these batches."""
    parts: dict[str, Any] = {
        "policy": trainer.student.policy,
        "execution": trainer.execution,
        "optimizer": trainer.optimizer,
        "scheduler": trainer.scheduler,
        "retention": trainer.retention,
        "clip_norm": 1.0,
        "data_s": 0.0,
    }
    return train_step(step, batches, **{**parts, **changed})
