"""Asked to end, a run finishes its step, saves, and says so."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from craftcli.choices import Mode
from craftcli.config import TrainConfig
from craftcli.engine.interrupt import interruptible
from craftcli.engine.trainer import Trainer


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_ends_at_the_step_and_saves(
    student: Any, new_data: Any, tmp_path: Path, number: signal.Signals
) -> None:
    config = TrainConfig(mode=Mode.NONE, steps=50, batch_size=2)
    trainer = Trainer(config, student, new_data, None, output=tmp_path / "run")

    def on_step(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), number)

    result = trainer.run(on_step, lambda entry: None, lambda note: None)
    assert result.interrupted
    assert result.last.step == 3
    assert result.checkpoint == tmp_path / "run/checkpoints/000003"
    assert (result.checkpoint / "pretrained_model/model.safetensors").is_file()


def test_the_second_request_is_obeyed_at_once() -> None:
    with interruptible() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
