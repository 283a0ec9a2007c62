"""Where metrics go besides the run's own file: Weights & Biases, TensorBoard or Trackio."""

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
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.report.metrics import LogEntry

PROJECT = "craft"
"""The name under which the services list runs."""
TENSORBOARD_FOLDER = "tensorboard"
"""In a run's folder: TensorBoard's event files."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run before its first entry."""

    folder: Path
    settings: Mapping[str, Any]
    resume: str | None = None
    """The id under which the run that goes on was tracked."""
    done: int = 0
    """Steps that are done; entries of later ones will come again."""


class RunTracker(Protocol):
    """Takes the entries of one run."""

    id: str | None
    """What a resumed run needs, so that its curves continue."""

    def log(self, entry: LogEntry) -> None:
        """Take an entry."""
        ...

    def close(self, *, failed: bool) -> None:
        """Nothing is logged after this."""
        ...


def require_tracker(kind: Tracker) -> None:
    """Refuse a tracker whose package is not installed, before anything else is done."""
    if kind is Tracker.NONE:
        return
    found = importlib.util.find_spec(kind)
    # A folder that happens to have the name is found too, but has no origin.
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
    """A started tracker, closed at the end however that comes."""
    tracker = _TRACKERS[kind](run)
    try:
        yield tracker
    except BaseException:
        tracker.close(failed=True)
        raise
    tracker.close(failed=False)


def flat_numbers(entry: LogEntry) -> dict[str, float]:
    """The numbers of an entry by name; those of modes, layers and constraints as `losses/hidden`.

    What was not measured is left out.
    """
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
    """Obeys W&B's own settings, such as WANDB_MODE=offline or WANDB_PROJECT."""

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
                "Weights & Biases does not start.",
                why=f"{str(error).splitlines()[0]}.",
                fix="run wandb login, or set WANDB_MODE=offline and wandb sync the run later.",
            ) from error
        self.id = self._run.id
        # As a value of its own: W&B drops what comes at a step that it has seen, and a run that
        # goes on from a checkpoint takes some steps again.
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

        # Purging hides the entries that were written after the checkpoint.
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
    """Local files, or the Space that TRACKIO_SPACE_ID names."""

    id: str | None

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        # It finds a run by its name alone, and folders of one name are common.
        name = run.resume or f"{run.folder.name}-{uuid.uuid4().hex[:8]}"
        with redirect_stdout(sys.stderr):  # standard output belongs to the command's data
            self._run = trackio.init(
                project=PROJECT,
                name=name,
                config=dict(run.settings),  # going on without would erase them
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
