"""Asked to end, a run finishes its step, saves, and says so."""

import os
import resource
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from craftcli.choices import Mode
from craftcli.config.train import TrainConfig
from craftcli.engine.ending import interruptible
from craftcli.engine.failed_step import StepStart
from craftcli.engine.trainer import Trainer
from craftcli.errors import CraftError


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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_spares_the_workers(
    student: Any, new_data: Any, tmp_path: Path, number: signal.Signals
) -> None:
    """The workers read batches until the training process has saved."""
    config = TrainConfig(mode=Mode.NONE, steps=400, batch_size=2, workers=1, log_every=1)
    trainer = Trainer(config, student, new_data, None, output=tmp_path / "run")

    hears, tells = os.pipe()

    def on_step(step: int) -> None:
        if step == 2:
            os.write(tells, b"now")
            time.sleep(2)  # a worker that dies of it would stop the run here

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none of them is used
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            ended = trainer.run(on_step, lambda _: None, lambda _: None)
            code = 130 if ended.interrupted else 2
        finally:
            os._exit(code)
    # Only the child may hold this end: if it dies, the read below returns at once.
    os.close(tells)
    # From outside: torch's workers end quietly if their own parent sends the signal.
    heard = os.read(hears, 3)
    os.close(hears)
    if heard:
        os.killpg(child, number)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert (tmp_path / "run/checkpoints/last/pretrained_model/model.safetensors").is_file()


def test_a_full_disk_keeps_the_last_good_checkpoint(
    student: Any, new_data: Any, tmp_path: Path
) -> None:
    config = TrainConfig(mode=Mode.NONE, steps=4, batch_size=2, save_every=2)
    trainer = Trainer(config, student, new_data, None, output=tmp_path / "run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_step(step: int) -> None:
        if step == 3:  # from here on no file may be larger, as on a disk that is full
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))

    try:
        with pytest.raises(CraftError, match="Cannot save step 4") as failed:
            trainer.run(on_step, lambda _: None, lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "--resume" in failed.value.fix
    checkpoints = tmp_path / "run/checkpoints"
    assert sorted(entry.name for entry in checkpoints.iterdir()) == ["000002", "last"]
    assert (checkpoints / "last").readlink() == Path("000002")


def test_a_failed_step_leaves_no_trace() -> None:
    """Batch norm, for instance, has averages that a forward pass changes."""
    policy = torch.nn.BatchNorm1d(2)
    position = {"start_index": 0}
    policy(torch.randn(4, 2))
    start = StepStart(policy, lambda: dict(position))
    kept = policy.state_dict()
    expected = {name: value.clone() for name, value in kept.items()}
    drawn = torch.get_rng_state()
    position["start_index"] = 4
    policy(torch.randn(4, 2))
    assert not torch.equal(policy.running_mean, expected["running_mean"])  # type: ignore[arg-type]
    start.put_back()
    assert start.position == {"start_index": 0}
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in policy.state_dict().items():
        assert torch.equal(value, expected[name]), name
