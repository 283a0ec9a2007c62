"""Small real things to damage: a sweep with a cache, a run, an interpolated policy and evaluations.

Beside it a LoRA run, with the dataset and the policy that it depends on.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from craftcli.cli.app import app
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.datasets import NEW, ensure_dataset
from craftcli.sweeps.runner import run_sweep
from craftcli.sweeps.sweep_file import read_sweep

SWEEP = """
[cache]
samples = 16
images = "embed"
[train]
steps = 6
save_every = 2
log_every = 1
batch_size = 2
anchor_batch_size = 2
device = "cpu"
[eval]
episodes = 2
env = ["demo:red", "demo:blue"]
[[arm]]
name = "hidden"
train = { mode = "hidden" }
[[arm]]
name = "half"
merge = { of = "hidden", alpha = 0.5 }
"""
LORA = ("--lora", "r=2,alpha=4,targets=q_proj", "--mode", "none", "--device", "cpu")
LORA_SIZES = ("--steps", "2", "--save-every", "1", "--batch-size", "2")


@dataclass(frozen=True, kw_only=True)
class Artefacts:
    """One sweep and one LoRA run, and what is in them."""

    sweep_file: Path
    sweep: Path
    cache: Path
    run: Path
    """A finished run with three checkpoints and an evaluation."""
    merged: Path
    """The policy between the run and its teacher."""
    lora: Path
    """A finished run with two checkpoints of LoRA weights."""
    data: Path
    """The dataset of the LoRA run."""
    base: Path
    """The policy under the LoRA weights."""


def make_artefacts(folder: Path) -> Artefacts:
    """Run a sweep of one training and one merge, and train LoRA weights."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "sweep.toml"
    file.write_text(SWEEP)
    result = run_sweep(read_sweep(file))
    if result.failures:
        raise RuntimeError(result.failures)
    (cache,) = result.folder.rglob("*.zarr")
    runs = result.folder / "runs"
    return Artefacts(
        sweep_file=file,
        sweep=result.folder,
        cache=cache,
        run=runs / "hidden/seed-0",
        merged=runs / "half/seed-0",
        lora=_train_lora(folder),
        data=folder / "data",
        base=folder / "base",
    )


def _train_lora(folder: Path) -> Path:
    shutil.copytree(ensure_dataset(NEW), folder / "data")
    shutil.copytree(TEACHER_FOLDER, folder / "base")
    run = folder / "lora"
    where = ("--policy", folder / "base", "--dataset", folder / "data", "-o", run)
    arguments = [str(a) for a in ("train", *LORA, *LORA_SIZES, *where)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    if done.exit_code:
        raise RuntimeError(done.output)
    return run
