"""One family: a teacher of the old skill, fine-tuned on the new one in every way, and measured."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families import FAMILIES, Family, arms
from world import Data, write_data, write_demo_data

from craftcli.config.train import TrainConfig
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.distributed import Processes
from craftcli.engine.retention.anchor_dataset import AnchorDataset
from craftcli.engine.run import open_run
from craftcli.engine.run_folder import METRICS_FILE
from craftcli.engine.summary_file import RunSummary
from craftcli.evaluation.action_error import predict_actions
from craftcli.evaluation.results import EVALUATIONS_FOLDER, Evaluation
from craftcli.policies.lerobot.batches import Remembered, read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset
from craftcli.sweeps.plan import folder_of
from craftcli.sweeps.progress import Job
from craftcli.sweeps.runner import run_sweep
from craftcli.sweeps.sweep_file import SweepSpec

REFUSED = "Retention would do nothing."
"""What craft says when no trained weight lies before the states that are to be held."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much of everything."""

    seeds: int = 2
    steps: int = 150
    """Of fine-tuning."""
    teaching: int | None = None
    """Steps on the old data; None for the family's own."""
    episodes: int = 48
    """Of the data that is trained on; a quarter as many are held out."""
    few: bool = False
    """Only plain, one setting of hidden states, and the default mode."""
    anchors: int = 128
    held_out: int = 64


FULL = Extent()
QUICK = Extent(few=True, seeds=1, steps=3, teaching=3, episodes=12, anchors=16, held_out=8)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one policy does on held-out frames; errors are shares of the actions' variance."""

    arm: str
    seed: int | None
    moved: float | None
    """Of the old data: its actions against the teacher's, as `craft eval` reports it."""
    old_error: float | None
    """Its actions against the expert's; None for a run that craft refused."""
    new_error: float | None
    new_loss: float | None
    """At the end of its training, over the last ten steps."""


def compare(work: Path, name: str, extent: Extent, on_job: Callable[[Job], None]) -> list[Row]:
    """Teach, fine-tune in every way, and measure; what was done before is kept."""
    family, folder = FAMILIES[name], work / name
    if name == "pi0_fast":
        data = write_demo_data(work / "data" / "demo", episodes=2 * extent.episodes)
    else:
        places = work / "data" / f"{family.cameras}-cameras"
        data = write_data(places, cameras=family.cameras, episodes=extent.episodes)
    fresh = folder / "fresh"
    if not fresh.is_dir():
        family.fresh(fresh)
    teacher = teach(folder, family, fresh, data, extent)
    every = list(arms(family))
    document: dict[str, Any] = {
        "output": "sweep",
        "seeds": list(range(extent.seeds)),
        "cache": {"dataset": str(data.old), "samples": extent.anchors, "kind": "hidden+action"},
        # Without the outputs that `--mode action` holds: what counts are the actions chosen.
        "held_out": {
            "dataset": str(data.old_test),
            "exclude": None,
            "samples": extent.held_out,
            "kind": "hidden",
        },
        "train": {
            "policy": str(teacher),
            "dataset": str(data.new),
            "device": "cpu",
            "steps": extent.steps,
            "batch_size": family.batch_size,
            "anchor_batch_size": family.batch_size,
            "lr": family.lr,
            "save_every": 0,
        },
        "arm": [every[0], *every[-3::2]] if extent.few else every,
    }
    spec = SweepSpec.from_dict(document, folder=folder)
    result = run_sweep(spec, on_job=on_job)
    if result.interrupted:
        raise KeyboardInterrupt
    for error in result.failures.values():
        if error.what != REFUSED:
            raise error
    tests = open_tests(data, teacher)
    rows = [measure(fresh, tests, arm="untrained"), measure(teacher, tests, arm="teacher")]
    for arm in spec.arms:
        for seed in spec.seeds:
            refused = f"train {arm.name}, seed {seed}" in result.failures
            run = folder_of(spec, arm.name, seed)
            rows.append(
                _refused(arm.name, seed)
                if refused
                else measure(run, tests, arm=arm.name, seed=seed)
            )
    return rows


def _refused(arm: str, seed: int) -> Row:
    return Row(arm=arm, seed=seed, moved=None, old_error=None, new_error=None, new_loss=None)


def teach(folder: Path, family: Family, fresh: Path, data: Data, extent: Extent) -> Path:
    """Let a fresh policy learn the old skill, with craft's own loop; the demo's knows it."""
    if not family.teaching:
        return TEACHER_FOLDER
    run = folder / "teacher"
    summary = RunSummary.read(run)
    if summary is None or not summary.complete:
        config = TrainConfig(
            mode="none",
            policy=str(fresh),
            dataset=str(data.old),
            output=run,
            overwrite=True,
            device="cpu",
            steps=family.teaching if extent.teaching is None else extent.teaching,
            lr=family.lr,
            batch_size=family.batch_size,
            save_every=0,
        )
        trainer = open_run(config, {}, Processes.from_environment()).trainer()
        ended = trainer.run(on_step=lambda _: None, on_log=lambda _: None, on_note=lambda _: None)
        if ended.interrupted:
            raise KeyboardInterrupt
    return run


def open_tests(data: Data, teacher: Path) -> tuple[Remembered, Remembered]:
    """The held-out old and new frames as the family reads them, decoded once for all policies."""
    config = load_checkpoint(str(teacher), device="cpu").policy.config
    old, new = (
        Remembered(open_dataset(str(root), root=None, policy_config=config))
        for root in (data.old_test, data.new_test)
    )
    return old, new


def measure(
    source: Path, tests: tuple[Remembered, Remembered], *, arm: str, seed: int | None = None
) -> Row:
    """Everything about one policy; all see the same frames and draw the same noise."""
    checkpoint = load_checkpoint(str(source), device="cpu")
    old_error, new_error = (expert_error(checkpoint, frames) for frames in tests)
    return Row(
        arm=arm,
        seed=seed,
        moved=None if seed is None else moved(source),
        old_error=old_error,
        new_error=new_error,
        new_loss=None if seed is None else last_loss(source),
    )


def expert_error(checkpoint: Checkpoint, dataset: Remembered) -> float:
    """The squared error of the chosen actions to the expert's, over the variance of those."""
    config = checkpoint.policy.config
    frames = list(range(len(dataset)))
    data = AnchorDataset(dataset, checkpoint)
    chosen = predict_actions(checkpoint, data, frames, seed=0, batch_size=len(frames))
    rows = read_rows(dataset, frames)
    now = list(config.action_delta_indices).index(0)
    taken = slice(now, now + chosen.shape[1])
    known = ~rows["action_is_pad"][:, taken]
    expert = rows["action"][:, taken][known]
    return float((chosen[known] - expert).square().mean() / expert.var(0).mean())


def moved(run: Path) -> float | None:
    """The action error that `craft eval` found."""
    for file in (run / EVALUATIONS_FOLDER).glob("*.json"):
        drift = Evaluation.load(file).drift
        if drift and drift.action:
            return drift.action.value
    return None


def last_loss(run: Path) -> float:
    """The loss on the new task that training ended with."""
    lines = (run / METRICS_FILE).read_text("utf-8").splitlines()
    return float(json.loads(lines[-1])["loss"])
