"""Plain fine-tuning by `lerobot-train` itself, with the data and settings of craft's own.

    uv run --extra metaworld python examples/metaworld_forgetting/lerobot_plain.py

Run it after `run.py --pairs gripper,still,far --groups statistics`. It reads the settings that
craft's runs left for LeRobot (`train_config.json`), trains with them from the same teacher, and
evaluates the result with `craft eval` on the same episodes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

# As in run.py: the same sums in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import typer

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from bench import FULL, PAIRS, REPORTED_EPISODES, TUNING_SEED, Extent, Pair
from reporting import TABLES, WORK, add_results, replaced

from craftcli.cli.app import app
from craftcli.compare.estimates import over_seeds
from craftcli.evaluation.results import Evaluation

ARM = "plain fine-tuning, --stats dataset"
"""The arm of craft's whose settings are used."""
FAMILY = "act"


def settings_of(work: Path, pair: Pair, seed: int) -> Path:
    """The `train_config.json` that craft's own plain run wrote for LeRobot."""
    sweep = work / f"{pair.name}-{FAMILY}" / "sweep-statistics"
    for file in sorted(sweep.glob("**/checkpoints/last/pretrained_model/train_config.json")):
        run = json.loads((file.parents[3] / "craft_config.json").read_text("utf-8"))
        run = run.get("config", run)
        if (run["mode"], run["stats"], run["seed"]) == ("none", "dataset", seed):
            return file
    raise typer.BadParameter(f"no run of {ARM!r} with seed {seed} in {sweep}: run run.py first")


def fine_tune(config: Path, teacher: Path, output: Path) -> Path:
    """Train with LeRobot's own command, unless that was done; the folder of the policy."""
    policy = output / "checkpoints/last/pretrained_model"
    if policy.is_dir():
        return policy
    # The settings of the run are LeRobot's own, but for where things go.
    words = {
        "config_path": config,
        "policy.path": teacher,
        "policy.push_to_hub": "false",
        "output_dir": output,
        "wandb.enable": "false",
        "save_freq": json.loads(config.read_text("utf-8"))["steps"],
    }
    options = [f"--{name}={value}" for name, value in words.items()]
    subprocess.run([sys.executable, "-m", "lerobot.scripts.lerobot_train", *options], check=True)
    return policy


def success(policy: Path, pair: Pair, file: Path, extent: Extent) -> dict[str, float]:
    """Old and new success, measured as for all other arms."""
    roles = {"old": pair.old, "new": (pair.new,)}
    if not file.is_file():
        tasks = [task for names in roles.values() for task in names]
        environments = [word for task in tasks for word in ("--env", f"metaworld:{task}")]
        words = ["eval", str(policy), *environments, "--episodes", str(extent.episodes)]
        words += [
            "--seed",
            str(REPORTED_EPISODES),
            "--max-steps",
            str(extent.max_steps),
            "--batch-size",
            "10",
            "-o",
            str(file),
        ]
        if code := app(words, standalone_mode=False):
            raise typer.Exit(code)
    rates = {found.environment: found.rate for found in Evaluation.load(file).success}
    return {
        role: fmean(rates[f"metaworld:{task}"] for task in tasks) for role, tasks in roles.items()
    }


def main(
    work: Annotated[Path, typer.Option(help="Where run.py put its runs.")] = WORK,
    pairs: Annotated[str, typer.Option(help="Which pairs of tasks.")] = "gripper,still,far",
    seeds: Annotated[int, typer.Option(help="Runs of every pair.")] = 3,
    tables: Annotated[Path, typer.Option(help="The file whose table is renewed.")] = TABLES,
) -> None:
    """Train, evaluate, report."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in pairs.split(","):
        pair, folder = PAIRS[name], work / f"{name}-{FAMILY}"
        teacher = (folder / "teacher-1/checkpoints/last/pretrained_model").resolve()
        for seed in range(TUNING_SEED + 1, TUNING_SEED + 1 + seeds):
            output = (folder / "lerobot-train" / f"seed-{seed}").resolve()
            policy = fine_tune(settings_of(work, pair, seed), teacher, output)
            rates = success(policy, pair, output.with_suffix(".json"), FULL)
            found.setdefault(name, []).append({"seed": seed, **rates})
    lines = ["| plain fine-tuning by `lerobot-train` | seeds | old success | new success |"]
    lines.append("| --- | --- | --- | --- |")
    for name, runs in found.items():
        pair = PAIRS[name]
        figures = [over_seeds([run[role] for run in runs]) for role in ("old", "new")]
        cells = [f"{figure.mean:.2f}" for figure in figures]
        title = f"{', '.join(pair.old)} → {pair.new}"
        lines.append(f"| {title} | {len(runs)} | {' | '.join(cells)} |")
    text = tables.read_text("utf-8") if tables.is_file() else ""
    tables.write_text(replaced(text, "lerobot-train", "\n".join(lines)), encoding="utf-8")
    add_results(tables, {"lerobot-train": found})


if __name__ == "__main__":
    typer.run(main)
