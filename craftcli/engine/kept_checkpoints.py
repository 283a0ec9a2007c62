"""Which checkpoints of a run stay: the last few, the best, and whatever craft did not write."""

import shutil
from pathlib import Path

from craftcli.engine.checkpoint_manifest import MANIFEST_FILE, CheckpointManifest
from craftcli.engine.run_folder import BEST, CHECKPOINTS, LAST
from craftcli.engine.saved_steps import checkpoint_steps
from craftcli.whole_files import set_aside_name, write_link


def point_to_best(run: Path, step: int | None) -> Path | None:
    """Let the link `best` name the checkpoint of a step; without a step there is no link."""
    link = run / CHECKPOINTS / BEST
    folder = checkpoint_steps(run).get(step) if step is not None else None
    if folder is None:
        if link.is_symlink():
            link.unlink()
        return None
    write_link(link, folder.name)
    return folder


def remove_older(run: Path, *, keep: int) -> list[Path]:
    """Remove all checkpoints but the `keep` last; returns those that were removed.

    The targets of the links `last` and `best` stay, and so does every folder that holds anything
    that craft did not write there.
    """
    steps = checkpoint_steps(run)
    links = [run / CHECKPOINTS / name for name in (LAST, BEST)]
    needed = {link.resolve().name for link in links if link.exists()}
    removed = []
    for step in sorted(steps)[:-keep]:
        folder = steps[step]
        if folder.name in needed or not _wholly_own(folder):
            continue
        # Renamed first: a checkpoint is there whole or not at all.
        aside = set_aside_name(folder, unfinished=True)
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        removed.append(folder)
    return removed


def _wholly_own(folder: Path) -> bool:
    """Whether the manifest of a checkpoint names every file in its folder."""
    try:
        manifest = CheckpointManifest.read(folder)
    except ValueError:
        return False
    if manifest is None or folder.is_symlink():
        return False
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return found <= {*manifest.files, MANIFEST_FILE}
