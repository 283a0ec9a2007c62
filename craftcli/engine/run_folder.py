"""The folder of a run: made fresh, replaced only when asked, and only if it is ours."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from craftcli.config import TrainConfig
from craftcli.errors import CraftError
from craftcli.run_files import CHECKPOINTS as CHECKPOINTS
from craftcli.run_files import CONFIG_FILE
from craftcli.run_files import METRICS_FILE as METRICS_FILE


def default_output(config: TrainConfig) -> Path:
    """Where a run goes when the user named no folder: a new one every time."""
    return config.output or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{config.mode}"


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that holds something, before any work is done."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / CONFIG_FILE).is_file():
        raise CraftError(
            f"{output} is in the way.",
            why="it exists and is no run of craft's, so it is never replaced.",
            fix="choose another folder with --output.",
        )
    if not overwrite:
        raise CraftError(
            f"The run {output} already exists.",
            why="runs are not replaced unasked.",
            fix="choose another folder with --output, or add --overwrite.",
        )


@contextmanager
def run_folder(output: Path, description: str, *, overwrite: bool) -> Iterator[None]:
    """A fresh run folder; a run that it replaces is gone only once the new one has ended well."""
    check_output(output, overwrite=overwrite)
    replaced = output.with_name(output.name + ".replaced")
    try:
        if output.is_dir():
            output.rename(replaced)
        output.mkdir(parents=True)
        (output / CONFIG_FILE).write_text(description, encoding="utf-8")
    except OSError as error:
        raise CraftError(
            f"Cannot write to {output}.",
            why=f"{error.strerror or error}.",
            fix="choose another folder with --output.",
        ) from error
    try:
        yield
    except BaseException:
        if replaced.exists() and not (output / CHECKPOINTS).exists():
            shutil.rmtree(output)
            replaced.rename(output)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
