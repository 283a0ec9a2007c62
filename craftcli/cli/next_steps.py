"""The command that usually follows another one, with what the user has chosen so far."""

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from craftcli.config.cache import CacheConfig
from craftcli.config.settings import Settings, Source, option_name
from craftcli.config.train import DEFAULT_CACHE, TrainConfig
from craftcli.demo.defaults import is_of_demo
from craftcli.engine.run_folder import CONFIG_FILE
from craftcli.locations import Location

if TYPE_CHECKING:
    from craftcli.cache.format import Manifest
    from craftcli.evaluation.run_check import RunInspection

HELD_OUT_ROWS = 128
"""Held-out anchors to measure drift on: enough for a mean, and few enough for small datasets."""


def after_build(config: CacheConfig) -> str:
    """Train with the cache that was built."""
    return train_on(config.output, demo=config.is_demo, policy=config.policy)


def train_on(cache: Location, *, demo: bool, policy: str) -> str:
    """Train a policy with a cache; the demo knows its own data."""
    parts = ["craft train"]
    if not demo:
        parts.append(f"--policy {quote(policy)} --dataset NEW_DATA")
    # Without --cache a run takes the cache of this name, if it is there.
    if cache != DEFAULT_CACHE:
        parts.append(f"--cache {quote(cache)}")
    return " ".join(parts)


def after_dryrun(source: Source[TrainConfig], *, own: Collection[str]) -> str:
    """Train with the same settings; `own` are those of the dry run alone."""
    return " ".join(["craft train", *_options(source, leave_out=own)])


def after_eval(run: Path) -> str:
    """Compare the run with those beside it."""
    beside = [folder for folder in run.parent.iterdir() if (folder / CONFIG_FILE).is_file()]
    return (
        f"craft compare {quote(run.parent)}/*" if len(beside) > 1 else f"craft compare {quote(run)}"
    )


def after_inspect(found: "RunInspection") -> str:
    """Continue, evaluate or compare the run, by where it stands."""
    run = quote(found.run)
    if found.state == "running":
        return f"craft inspect {run}, when it has ended."
    if found.state == "empty":
        return f"craft train --output {run} --overwrite, with the options of this run."
    if found.state == "interrupted":
        return f"craft train --resume {run}"
    if any(made.step == found.step for made in found.evaluations):
        return after_eval(Path(found.run))
    return f"craft eval {run}"


def held_out_build(cache: str, manifest: "Manifest") -> str | None:
    """Build a cache of frames that a run was not trained to hold; None if none are left.

    Anchors that were made, or that show new data under old instructions, are of no frame that a
    build could leave out: any frame of the old data is held out from them.
    """
    frames = manifest.dataset.frames if manifest.has_dataset else 0
    from_old = frames > 0 and manifest.prompts_digest is None
    real = manifest.rows - (manifest.made.rows if manifest.made else 0)
    left = frames - real if from_old else HELD_OUT_ROWS
    if left < 1:
        return None
    parts = ["craft cache build"]
    if not is_of_demo(manifest.teacher.policy_type):
        named = [old.root or old.repo_id for old in manifest.parts] if from_old else ["OLD_DATA"]
        data = " ".join(f"--dataset {quote(name)}" for name in named)
        parts.append(f"--policy {quote(manifest.teacher.source)} {data}")
    if from_old:
        parts.append(f"--exclude {quote(cache)}")
    # A cache cannot be written over the one that it leaves out.
    output = "held_out-2.zarr" if Path(cache).name == "held_out.zarr" else "held_out.zarr"
    parts.append(f"--samples {min(left, HELD_OUT_ROWS)} --output {output}")
    return " ".join(parts)


def after_merge(folder: Path, *, demo: bool) -> str:
    """Evaluate the interpolated policy."""
    return f"craft eval {quote(folder)}" + ("" if demo else " --env ENV, or --dataset DATA")


def quote(value: Any) -> str:
    """A value as a shell reads it."""
    return shlex.quote(str(value))


def _options[S: Settings](source: Source[S], *, leave_out: Collection[str]) -> list[str]:
    """The options that were given on the command line, and the file."""
    found = [] if source.file is None else [f"--config {quote(source.file)}"]
    for name, who in source.origin.items():
        if who != "flag" or name in leave_out:
            continue
        value = getattr(source.settings, name)
        if isinstance(value, bool):
            found.append(option_name(name) if value else f"--no-{option_name(name)[2:]}")
        else:
            several = value if isinstance(value, tuple) else (value,)
            found += [f"{option_name(name)} {quote(entry)}" for entry in several]
    return found
