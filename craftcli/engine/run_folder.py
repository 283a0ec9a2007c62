"""The folder of a run: how a run creates or replaces it.

A run that is replaced with --overwrite is set aside under a name that nobody can guess, beside its
successor, which notes that name. It is removed once the successor has taken its last step, and put
back if the successor ends without a checkpoint. If the successor is killed before that, the next
`craft train --output` into the folder puts it back first.
"""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from craftcli.config.train import TrainConfig
from craftcli.engine.run_files import BEST as BEST
from craftcli.engine.run_files import CHECKPOINTS as CHECKPOINTS
from craftcli.engine.run_files import CONFIG_FILE as CONFIG_FILE
from craftcli.engine.run_files import EVALUATIONS_FOLDER as EVALUATIONS_FOLDER
from craftcli.engine.run_files import LAST as LAST
from craftcli.engine.run_files import MERGE_FILE as MERGE_FILE
from craftcli.engine.run_files import METRICS_FILE as METRICS_FILE
from craftcli.engine.run_files import REPLACES_FILE, is_left_over, require_own_run
from craftcli.engine.run_files import STATE_FILE as STATE_FILE
from craftcli.engine.run_files import SUMMARY_FILE as SUMMARY_FILE
from craftcli.engine.run_lock import LOCK_FILE, NoLocksError, holder, require_free, run_locked
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.whole_files import find_set_aside, is_set_aside, set_aside_name, write_text

_created: set[Path] = set()
"""Folders that this process created for runs of its own."""


def claim_output(config: TrainConfig) -> Path:
    """The user's folder, or a new empty one named by the time and the mode.

    A new one is created here, so that two runs that start in the same second get two folders.
    `released_if_empty` removes it again.
    """
    if config.output is not None:
        return config.output
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{config.mode}"
    for number in itertools.count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            if not folder.parent.exists():
                folder.parent.mkdir()
                _created.add(folder.parent.absolute())
            folder.mkdir()
            _created.add(folder.absolute())
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_write(folder, error) from error
        return folder
    raise AssertionError("there is always a next number")


@contextmanager
def released_if_empty(output: Path) -> Iterator[None]:
    """If the block fails, remove what `claim_output` created and nobody has used yet."""
    try:
        yield
    except BaseException:
        for folder in (output.absolute(), output.absolute().parent):
            if folder in _created:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
                    _created.discard(folder)
        raise


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that must not be replaced, before any work is done."""
    folder = _whole_path(output)
    if not folder.name:
        raise CraftError(
            f"Refusing to write a run to {output}.",
            why="it is the root of a disk, not a folder of its own.",
            fix="choose a folder with --output.",
            exit_code=EXIT_USAGE,
        )
    if not os.path.lexists(folder) or (folder.is_dir() and not _entries(folder)):
        return
    require_free(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise CraftError(
            f"Refusing to overwrite {output}: it was not written by craft train.",
            why=f"it has no {CONFIG_FILE}.",
            fix="choose another folder with --output.",
        )
    if not overwrite:
        older = replaced_run(folder)
        kept = f" The run that it was to replace is kept in {older}." if older else ""
        raise CraftError(
            f"The run {output} already exists.",
            why=f"a run is only replaced with --overwrite.{kept}",
            fix="choose another folder with --output, or add --overwrite.",
        )
    require_own_run(folder)


@contextmanager
def run_folder(output: Path, description: str, *, overwrite: bool) -> Iterator[str | None]:
    """A new run folder, locked; yields why it could not be locked, or None.

    A run that it replaces is set aside. It is put back if the new run fails before it has a
    checkpoint, and stays aside until `remove_replaced` otherwise.
    """
    check_output(output, overwrite=overwrite)
    folder = _whole_path(output)
    with ExitStack() as locks:
        aside: Path | None = None
        created = ready = False
        try:
            if folder.is_dir() and _entries(folder):
                aside = _set_aside(folder, locks)
            folder.mkdir(parents=True, exist_ok=True)
            unlocked = lock_folder(folder, locks)
            if _entries(folder):
                raise _taken(output)
            created = True
            if aside:
                write_text(folder / REPLACES_FILE, json.dumps({"folder": aside.name}))
            write_text(folder / CONFIG_FILE, description)
            ready = True
            yield unlocked
        except BaseException as error:
            if aside and not has_checkpoint(folder):
                locks.close()
                # What another process has created in the meantime stays.
                with suppress(OSError):
                    if created:
                        _swap(aside, folder)
                    else:
                        aside.rename(folder)
            if isinstance(error, OSError) and not ready:
                raise _cannot_write(output, error) from error
            raise


def lock_folder(folder: Path, locks: ExitStack) -> str | None:
    """Lock a folder until the stack closes; returns why that is not possible, or None."""
    try:
        locks.enter_context(run_locked(folder))
    except NoLocksError as error:
        return str(error)
    return None


def has_checkpoint(run: Path) -> bool:
    """Whether the run has saved a checkpoint."""
    return (run / CHECKPOINTS / LAST).exists()


def replaced_run(run: Path) -> Path | None:
    """The folder of the run that this one replaces; None if there is none."""
    folder = _whole_path(run)
    return _noted(folder, folder)


def remove_replaced(run: Path) -> None:
    """Remove the run that this one replaces, now that it is finished, and what that one replaced.

    Only folders that `run_folder` set aside for this run are removed.
    """
    folder = _whole_path(run)
    chain = [folder]
    while (older := _noted(chain[-1], folder)) and older not in chain:
        chain.append(older)
    for older in reversed(chain[1:]):
        shutil.rmtree(older, ignore_errors=True)
    with suppress(FileNotFoundError):
        (folder / REPLACES_FILE).unlink()


def _noted(folder: Path, run: Path) -> Path | None:
    """What the run in a folder replaces: `run` itself, or one that was set aside for it."""
    try:
        name = json.loads((folder / REPLACES_FILE).read_text("utf-8"))["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # It must be a name that craft makes for this run: the file may come from anywhere.
    if not isinstance(name, str) or not is_set_aside(name, run):
        return None
    aside = run.with_name(name)
    return aside if aside.is_dir() and not aside.is_symlink() else None


def lost_run(output: Path) -> Path | None:
    """The good run that a killed `craft train --overwrite` has set aside, if it should come back.

    That is so if the killed run has left no checkpoint, and no process works on either of them.
    """
    folder = _whole_path(output)
    if not folder.name or has_checkpoint(folder) or holder(folder):
        return None
    aside = replaced_run(folder)
    if aside is None and not (folder.is_dir() and _entries(folder)):
        # Killed before the new folder could name the old one.
        found = [run for run in find_set_aside(folder) if (run / CONFIG_FILE).is_file()]
        aside = max(found, key=lambda run: run.stat().st_mtime, default=None)
    return aside if aside and not holder(aside) else None


def recover_lost_run(output: Path) -> str | None:
    """Put the run of `lost_run` back into its place; returns a sentence about it, or None."""
    aside, folder = lost_run(output), _whole_path(output)
    if aside is None:
        return None
    try:
        _swap(aside, folder)
    except OSError as error:
        raise _cannot_write(output, error) from error
    return (
        f"recovered the run {output}: an earlier train --overwrite was killed before its first "
        "checkpoint, and the run that it was to replace is back in its place."
    )


def _set_aside(folder: Path, locks: ExitStack) -> Path:
    with ExitStack() as own:
        lock_folder(folder, own)
        aside = set_aside_name(folder)
        if os.name == "nt":
            own.close()  # Windows renames no folder with an open file
        folder.rename(aside)
        locks.push(own.pop_all())
    return aside


def _swap(aside: Path, folder: Path) -> None:
    """Give an old run its place again; a new one there, which has no checkpoint, is removed."""
    failed = set_aside_name(folder, unfinished=True)
    if os.path.lexists(folder):
        folder.rename(failed)
    aside.rename(folder)
    shutil.rmtree(failed, ignore_errors=True)


def _entries(folder: Path) -> list[str]:
    """What is in the folder, but for what a killed start may leave: the lock, temporary files."""
    names = [entry.name for entry in folder.iterdir()]
    return [name for name in names if name != LOCK_FILE and not is_left_over(name)]


def _whole_path(output: Path) -> Path:
    """The path with a name of its own, also for `.` and `..`."""
    return Path(os.path.abspath(output))


def _taken(output: Path) -> CraftError:
    return CraftError(
        f"The run {output} already exists.",
        why="another process has just created it.",
        fix="choose another folder with --output.",
    )


def _cannot_write(output: Path, error: OSError) -> CraftError:
    return CraftError(
        f"Cannot write to {output}.",
        why=f"{error.strerror or error}.",
        fix="choose another folder with --output.",
    )
