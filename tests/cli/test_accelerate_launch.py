"""`accelerate launch` starts craft's processes as torchrun does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny.processes import together
from typer.testing import CliRunner

from craftcli.cli.app import app

LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
SETTINGS = "--steps 4 --batch-size 2 --anchor-batch-size 2 --device cpu --mode hidden"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints/last/pretrained_model/model.safetensors")


@pytest.mark.slow
def test_two_processes_train_what_two_processes_train(
    cache: Path, new_data: Any, tmp_path: Path
) -> None:
    """Named for GPUs, it is accelerate's only way to several processes, and needs none."""
    train = ["train", *SETTINGS.split(), "--cache", str(cache), "--output"]
    # What accelerate would otherwise say it assumes.
    assumed = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    command = (*LAUNCH, *assumed, "--main_process_port", "0", "-m", "craftcli", *train, "launched")
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("Using the built-in demo") == 1
    state = json.loads((tmp_path / "launched/checkpoints/last/craft_state.json").read_text())
    assert (state["step"], state["world"]) == (4, 2)

    def work() -> None:
        result = CliRunner().invoke(app, [*train, str(tmp_path / "forked")])
        assert result.exit_code == 0, result.output

    together(work)
    forked = weights(tmp_path / "forked")
    for name, tensor in weights(tmp_path / "launched").items():
        assert torch.equal(tensor, forked[name]), name
