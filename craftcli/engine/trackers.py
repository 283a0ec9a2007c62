"""Experiment trackers that get the metrics too: Weights & Biases, TensorBoard or Trackio."""

import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from craftcli.choices import Tracker
from craftcli.engine.metrics import LogEntry
from craftcli.errors import EXIT_USAGE, CraftError

PROJECT = "craft"
"""The project name in the services."""
TENSORBOARD_FOLDER = "tensorboard"
"""The folder of TensorBoard's event files in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run, as a tracker needs it before the first entry."""

    folder: Path
    settings: Mapping[str, Any]
    resume: str | None = None
    """The tracker's id of the run to resume."""
    done: int = 0
    """Steps done at the checkpoint; entries of later steps will be logged again."""


class RunTracker(Protocol):
    """Logs the entries of one run."""

    id: str | None
    """The id that lets a resumed run continue its curves."""

    def log(self, entry: LogEntry) -> None:
        """Log an entry."""
        ...

    def close(self, *, failed: bool) -> None:
        """End the tracking of the run."""
        ...


def require_tracker(kind: Tracker) -> None:
    """Refuse a tracker if its package is not installed, before any work is done."""
    if kind is Tracker.NONE:
        return
    found = importlib.util.find_spec(kind)
    # A folder of that name is found too, but has no origin.
    if found is None or found.origin is None:
        raise CraftError(
            f"--tracker {kind} cannot be used.",
            why=f"the package {kind} is not installed.",
            fix=f"pip install 'craftcli[{kind}]', or leave --tracker out: metrics.jsonl is always "
            "written.",
            exit_code=EXIT_USAGE,
        )


@contextmanager
def tracking(kind: Tracker, run: TrackedRun) -> Iterator[RunTracker]:
    """Start a tracker, and close it at the end, also after a failure."""
    tracker = _TRACKERS[kind](run)
    try:
        yield tracker
    except BaseException:
        tracker.close(failed=True)
        raise
    tracker.close(failed=False)


def flat_numbers(entry: LogEntry) -> dict[str, float]:
    """The measured numbers of an entry by name; those of modes and layers as `losses/hidden`."""
    values = {name: value for name, value in asdict(entry).items() if name not in ("step", "steps")}
    for group in ("losses", "lams"):
        values |= {f"{group}/{name}": value for name, value in (values.pop(group) or {}).items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


class _NoTracker:
    id: str | None = None

    def __init__(self, run: TrackedRun) -> None:
        pass

    def log(self, entry: LogEntry) -> None:
        pass

    def close(self, *, failed: bool) -> None:
        pass


class _Wandb:
    """Weights & Biases; respects its own settings, such as WANDB_MODE=offline or WANDB_PROJECT."""

    id: str | None

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        new = {"name": run.folder.name, "config": dict(run.settings)}
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                dir=run.folder,
                settings=wandb.Settings(silent=True, console="off"),
                **({"id": run.resume, "resume": "allow"} if run.resume else new),
            )
        except wandb.errors.Error as error:
            raise CraftError(
                "Cannot start Weights & Biases.",
                why=f"{str(error).splitlines()[0]}.",
                fix="run wandb login, or set WANDB_MODE=offline and wandb sync the run later.",
            ) from error
        self.id = self._run.id
        # The step is a metric, because W&B drops entries of a step that it has already seen, and a
        # resumed run repeats some steps.
        self._run.define_metric("*", step_metric="step")

    def log(self, entry: LogEntry) -> None:
        self._run.log({"step": entry.step, **flat_numbers(entry)})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _TensorBoard:
    """Event files in the run's own folder."""

    id: str | None = TENSORBOARD_FOLDER

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Purging hides the entries after the checkpoint, which the run logs again.
        self._writer: Any = SummaryWriter(
            str(run.folder / TENSORBOARD_FOLDER), purge_step=run.done + 1 if run.resume else None
        )
        if not run.resume:
            shown = json.dumps(dict(run.settings), indent=2)
            self._writer.add_text("settings", f"```json\n{shown}\n```")

    def log(self, entry: LogEntry) -> None:
        for name, value in flat_numbers(entry).items():
            self._writer.add_scalar(name, value, entry.step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _Trackio:
    """Trackio: local files, or the Space in TRACKIO_SPACE_ID."""

    id: str | None

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        # Trackio identifies a run by its name alone, and many folders have the same name.
        name = run.resume or f"{run.folder.name}-{uuid.uuid4().hex[:8]}"
        with redirect_stdout(sys.stderr):  # standard output belongs to the command's data
            self._run = trackio.init(
                project=PROJECT,
                name=name,
                config=dict(run.settings),  # resuming without them would erase them
                resume="allow" if run.resume else "never",
                embed=False,
            )
        self.id = name

    def log(self, entry: LogEntry) -> None:
        self._run.log(flat_numbers(entry), step=entry.step)

    def close(self, *, failed: bool) -> None:
        import trackio

        with redirect_stdout(sys.stderr):
            trackio.finish()  # type: ignore[no-untyped-call]  # it is left untyped


_TRACKERS: Mapping[Tracker, Callable[[TrackedRun], RunTracker]] = {
    Tracker.NONE: _NoTracker,
    Tracker.WANDB: _Wandb,
    Tracker.TENSORBOARD: _TensorBoard,
    Tracker.TRACKIO: _Trackio,
}
