"""Small real things to damage: a sweep with cache, run, interpolated policy and evaluations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craftcli.sweeps.runner import run_sweep
from craftcli.sweeps.sweep_file import SweepSpec

SWEEP: dict[str, Any] = {
    "cache": {"samples": 16, "images": "embed"},
    "train": {
        "steps": 6,
        "save_every": 2,
        "log_every": 1,
        "batch_size": 2,
        "anchor_batch_size": 2,
        "device": "cpu",
    },
    "eval": {"episodes": 2, "env": ["demo:red", "demo:blue"]},
    "arm": [
        {"name": "hidden", "train": {"mode": "hidden"}},
        {"name": "half", "merge": {"of": "hidden", "alpha": 0.5}},
    ],
}


@dataclass(frozen=True, kw_only=True)
class Artefacts:
    """One sweep, and what is in it."""

    sweep: Path
    cache: Path
    run: Path
    """A finished run with three checkpoints and an evaluation."""
    merged: Path
    """The policy between the run and its teacher."""


def make_artefacts(folder: Path) -> Artefacts:
    """Run a sweep of one training and one merge."""
    result = run_sweep(SweepSpec.from_dict(SWEEP, folder=folder))
    if result.failures:
        raise RuntimeError(result.failures)
    (cache,) = result.folder.rglob("*.zarr")
    runs = result.folder / "runs"
    return Artefacts(
        sweep=result.folder,
        cache=cache,
        run=runs / "hidden/seed-0",
        merged=runs / "half/seed-0",
    )
