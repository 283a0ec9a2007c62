"""Does retention keep the old skill? Measured in closed loop on the built-in demo.

    uv run python examples/demo_forgetting/run.py               # the table of the README
    uv run python examples/demo_forgetting/run.py --ablations   # what changes with the settings
    uv run python examples/demo_forgetting/run.py --quick       # a few steps, to see that it runs

Fine-tunes the demo's teacher on its new instruction, plainly and under retention, and rolls every
policy out on the old and the new instructions. What an arm does not name is the command's default.
"""

import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer

from craftcli.choices import Pooling, SurgeryScope
from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from craftcli.cache.build import build_cache
from craftcli.config import CacheConfig, TrainConfig
from craftcli.demo.defaults import DEMO_TRAINING
from craftcli.demo.evaluate import evaluate
from craftcli.engine.opening import open_retention
from craftcli.engine.reach import find_reach, freeze
from craftcli.engine.session import open_anchor_data, open_policy, open_task_data
from craftcli.engine.trainer import Trainer
from craftcli.settings import resolve


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way of fine-tuning: settings of `craft cache build` and `craft train`."""

    name: str
    train: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)


PLAIN = Arm(name="`--mode none`", train={"mode": "none"})
DEFAULTS = Arm(name="`--mode hidden`")
ABLATIONS = (
    PLAIN,
    DEFAULTS,
    Arm(name="`--freeze-downstream`", train={"freeze_downstream": True}),
    Arm(name="`--surgery none`", train={"surgery": SurgeryScope.NONE}),
    Arm(
        name="`--mode hidden+action`",
        train={"mode": "hidden+action"},
        cache={"kind": "hidden+action"},
    ),
    Arm(name="`--mode action`", train={"mode": "action"}, cache={"kind": "action"}),
    Arm(name="`--mode token_ce`", train={"mode": "token_ce"}, cache={"kind": "token_ce"}),
    Arm(name="`--mode replay`", train={"mode": "replay"}),
    Arm(name="`--mode l2sp`", train={"mode": "l2sp"}),
    Arm(name="`--mode ewc`", train={"mode": "ewc"}),
    Arm(name="`--retention-every 5`", train={"retention_every": 5}),
    Arm(
        name="`--retention-every 5 --freeze-downstream`",
        train={"retention_every": 5, "freeze_downstream": True},
    ),
    Arm(name="`--samples 64`", cache={"samples": 64}),
    Arm(name="`--pooling mean_action_tokens`", cache={"pooling": Pooling.MEAN_ACTION_TOKENS}),
    Arm(name="`--pooling vision_text`", cache={"pooling": Pooling.VISION_TEXT}),
)
QUICK = {"steps": 3, "batch_size": 4, "anchor_batch_size": 4}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Success of one policy; rollouts are on the same scenes for all of them."""

    arm: str
    seed: int | None
    old: float
    new: float
    l_ret: float | None
    """Mean over the last 20 retention steps."""


def measure(
    checkpoint: Any, *, arm: str, rollouts: int, seed: int | None = None, l_ret: float | None = None
) -> Row:
    """Roll a policy out and print what it reached."""
    success = evaluate(
        checkpoint.policy, checkpoint.preprocess, checkpoint.postprocess, rollouts=rollouts
    )
    drift = "" if l_ret is None else f"{l_ret:.4f}"
    shown = "" if seed is None else seed
    typer.echo(f"| {arm} | {shown} | {success.old:.2f} | {success.new:.2f} | {drift} |")
    return Row(arm=arm, seed=seed, old=success.old, new=success.new, l_ret=l_ret)


def fine_tune(arm: Arm, seed: int, quick: bool, rollouts: int) -> Row:
    """Build the cache and train as the two commands would with the arm's settings."""
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch) / "anchors.zarr"
        flags = {"seed": seed, "cache": cache, **arm.train, **(QUICK if quick else {})}
        config = resolve(TrainConfig, flags=flags, demo=DEMO_TRAINING).settings
        student = open_policy(config)
        data = open_task_data(config, student)
        retention = None
        if config.retains:
            build(CacheConfig(output=cache, **{"samples": 32} if quick else {}, **arm.cache))
            retention = open_retention(config, student, cache)
        trainer = Trainer(config, student, data, retention, output=Path(scratch) / "run")
        if retention and config.freeze_downstream:
            batch = trainer.sample_batch()
            reach = find_reach(student.policy, student.adapter, retention, batch)
            freeze(student.policy, reach.downstream)
        turns = [report.retention for report in trainer.steps() if report.retention]
    last = fmean(turn.loss for turn in turns[-20:]) if turns else None
    return measure(student, arm=arm.name, rollouts=rollouts, seed=seed, l_ret=last)


def build(config: CacheConfig) -> None:
    """Run the teacher over the old data."""
    teacher = open_policy(config)
    data = open_anchor_data(config, teacher)
    build_cache(config, teacher, data, on_plan=lambda _: None, on_rows=lambda _: None)


def main(
    seeds: int = 2,
    rollouts: int = 50,
    ablations: bool = False,
    quick: bool = False,
    out: Path | None = None,
) -> None:
    """Print a table, and write it as JSON if asked to."""
    if quick:
        seeds, rollouts = 1, 4
    arms = ABLATIONS if ablations else (PLAIN, DEFAULTS)
    typer.echo(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, {rollouts} rollouts")
    typer.echo("| | seed | old | new | L_ret at the end |\n|---|---|---|---|---|")
    rows = [measure(open_policy(CacheConfig()), arm="teacher", rollouts=rollouts)]
    for arm in arms:
        rows += [fine_tune(arm, seed, quick, rollouts) for seed in range(seeds)]
    if out:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    typer.run(main)
