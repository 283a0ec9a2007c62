"""A run that is killed and resumed ends in the same state as an undisturbed one."""

import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.run import open_run
from craftcli.engine.trainer import RunResult

STEPS, SAVED, KILLED = 30, 17, 22


@pytest.fixture(scope="module")
def anchors(build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("all-kinds") / "a.zarr", kind="hidden+action+token_ce")


def settings(output: Path, cache: Path, **changed: Any) -> TrainConfig:
    small = {"steps": STEPS, "batch_size": 4, "anchor_batch_size": 4, "save_every": SAVED}
    return TrainConfig(
        **{**small, "device": "cpu", "log_every": 5, **changed}, output=output, cache=cache
    )


def train(config: TrainConfig, on_step: Callable[[int], None] = lambda _: None) -> RunResult:
    trainer = open_run(config, {}, Processes()).trainer()
    return trainer.run(on_step, lambda _: None, lambda _: None)


def killed(config: TrainConfig) -> None:
    """Run in a process of its own that is killed without warning in the middle."""

    def kill(step: int) -> None:
        if step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none of them is used
        child = os.fork()
    if child == 0:
        train(config, kill)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def outcome(run: Path) -> tuple[dict[str, Any], list[Any], Any]:
    last = run / "checkpoints/last"
    (file,) = (last / "pretrained_model").glob("*model.safetensors")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    entries = [
        {k: v for k, v in json.loads(line).items() if not k.endswith("_s")} for line in lines
    ]
    return load_file(file), entries, json.loads((last / "craft_state.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"mode": "hidden", "epsilon_start": 0.001},
        # Steps of one backward pass and of two, before and after the checkpoint.
        {"mode": "hidden", "epsilon_start": 0.05, "lr": 3e-4},
        {"mode": "token_ce", "grad_accum": 2},
        {"mode": "hidden+action", "constraints": "each", "controller": "nupi", "seed": 2},
        {"mode": "action", "retention_every": 3},
        {"mode": "replay+l2sp", "epsilon_schedule": "auto"},
        {"mode": "hidden+action", "held_out_share": 0.5, "retention_every": 2},
        {"mode": "hidden", "lora": "r=4,alpha=8,targets=q_proj;v_proj"},
    ],
    ids=lambda changed: "-".join(map(str, changed.values())),
)
def test_a_killed_run_ends_as_an_undisturbed_one(
    anchors: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    """Pitfall 10: λ, ε, random states and positions come back, from the run's folder alone."""
    train(settings(tmp_path / "whole", anchors, **changed))
    killed(settings(tmp_path / "killed", anchors, **changed))
    assert not (tmp_path / "killed/checkpoints/000030").exists()
    train(TrainConfig(resume=tmp_path / "killed"))
    whole, resumed = outcome(tmp_path / "whole"), outcome(tmp_path / "killed")
    assert whole[0].keys() == resumed[0].keys()
    assert [name for name in whole[0] if not whole[0][name].equal(resumed[0][name])] == []
    assert whole[1:] == resumed[1:]
