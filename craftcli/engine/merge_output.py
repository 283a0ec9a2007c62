"""Where an interpolated policy may be written."""

from pathlib import Path

from craftcli.engine.run_files import require_own_merge
from craftcli.engine.run_folder import MERGE_FILE
from craftcli.errors import CraftError


def check_merge_output(output: Path, *, overwrite: bool) -> None:
    """Refuse a folder for an interpolated policy that must not be replaced."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MERGE_FILE).is_file():
        raise CraftError(
            f"Refusing to overwrite {output}: it was not written by craft merge.",
            why=f"it has no {MERGE_FILE}.",
            fix="choose another folder with --output.",
        )
    if not overwrite:
        raise CraftError(
            f"{output} already exists.",
            why="a policy is only replaced with --overwrite.",
            fix="choose another folder with --output, or add --overwrite.",
        )
    require_own_merge(output)
