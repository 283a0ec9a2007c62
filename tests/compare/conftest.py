"""Made-up runs, for tests of their comparison."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from craftcli.compare.runs import Measured, Quantity, RunRecord
from craftcli.engine.summary_file import RunSummary
from craftcli.evaluation.results import Episode, Success

OLD_TASKS = ("demo:red", "demo:green")
NEW_TASK = "demo:blue"


def _success(environment: str, rate: float, *, episodes: int = 50, seed: int = 1000) -> Success:
    count = round(rate * episodes)
    return Success(
        environment=environment,
        group="new" if environment == NEW_TASK else "old",
        max_steps=8,
        episodes=tuple(Episode(seed=seed + i, success=i < count, steps=8) for i in range(episodes)),
    )


def _measured(old: float, new: float, *, episodes: int = 50, **changed: Any) -> Measured:
    all_successes = [_success(name, old, episodes=episodes) for name in OLD_TASKS]
    all_successes.append(_success(NEW_TASK, new, episodes=episodes))
    values: dict[str, Any] = {
        "successes": {found.environment: found for found in all_successes},
        "drift": Quantity(value=0.02 * (1.1 - old), basis="anchors"),
        "action_error": Quantity(value=0.05 * (1.1 - old), basis="anchors"),
        "policy": "student",
    }
    return Measured(**{**values, **changed})


def _summary(**changed: Any) -> RunSummary:
    values: dict[str, Any] = {
        "steps": 400,
        "steps_done": 400,
        "seconds": 69.0,
        "peak_memory_bytes": 2**30,
        "parameters": 420_000,
        "trainable_parameters": 420_000,
        "anchors": 512,
        "anchor_targets": {"kinds": ["hidden"], "layers": [2, 3]},
        "anchor_dataset": "old",
        "teacher": "teacher",
        "teacher_source": "demo",
        "dataset": "new",
        "dataset_fingerprint": "data",
    }
    return RunSummary(**{**values, **changed})


def _metrics(steps: int = 400, *, retains: bool = True, shift: float = 0.0) -> tuple[Any, ...]:
    entries = []
    for step in range(10, steps + 1, 10):
        entry: dict[str, Any] = {"step": step, "loss": math.exp(-step / 80) + 0.001}
        if retains:
            entry |= {
                "l_ret": 0.03 * math.exp(-step / 150) + 0.001 + shift / 100,
                "lam": 1 + shift + math.sin(step / 60) / 5,
                "epsilon": 0.02,
                "cos": -0.1 + shift / 4 + math.sin(step / 20) / 20,
                "conflict_rate": max(0.0, 0.6 - step / 500 - shift / 5),
            }
        entries.append(entry)
    return tuple(entries)


def _run(name: str, *, old: float, new: float, seed: int = 0, **changed: Any) -> RunRecord:
    settings = {"mode": name, "seed": seed, "retention_every": 1, "output": f"runs/{name}-{seed}"}
    settings |= changed.pop("settings", {})
    values: dict[str, Any] = {
        "folder": Path(f"runs/{name}-{seed}"),
        "kind": "run",
        "settings": settings,
        "summary": _summary(anchors=None, anchor_targets=None) if name == "none" else _summary(),
        "metrics": _metrics(retains=name != "none", shift=seed / 10),
        "measured": _measured(old, new),
        "saved": True,
        "seed": seed,
    }
    return RunRecord(**{**values, **changed})


def _teacher(*, old: float = 1.0, new: float = 0.0) -> RunRecord:
    found = _measured(old, new, policy="teacher", drift=None, action_error=None)
    return _run(
        "teacher",
        old=old,
        new=new,
        kind="policy",
        settings={},
        summary=None,
        metrics=(),
        measured=found,
    )


@pytest.fixture
def run_of() -> Callable[..., RunRecord]:
    """A run of a mode with these rates of success on the old tasks and the new one."""
    return _run


@pytest.fixture
def teacher_of() -> Callable[..., RunRecord]:
    """The evaluation of the teacher."""
    return _teacher


@pytest.fixture
def measured_of() -> Callable[..., Measured]:
    """An evaluation with these rates of success."""
    return _measured


@pytest.fixture
def summary_of() -> Callable[..., RunSummary]:
    """The summary of a run."""
    return _summary
