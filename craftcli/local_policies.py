"""Finds the folder of a policy on this machine. Nothing heavy is imported, so it fails quickly."""

from pathlib import Path

from craftcli.errors import CraftError

CONFIG = "config.json"
RUN_CONFIG = "craft_config.json"
"""The settings of a run; a folder with this file is a run of craft."""
_INSIDE = ("", "pretrained_model", "checkpoints/last/pretrained_model")


def find_local_policy(source: str) -> Path | None:
    """The folder with config.json and the weights: `source`, or inside a run; None on the Hub.

    Raises:
        CraftError: `source` can only be a folder, and holds no policy.
    """
    given = Path(source).expanduser()
    for folder in (given / inside for inside in _INSIDE):
        if (folder / CONFIG).is_file():
            return folder.resolve()
    # A policy on the Hub is OWNER/NAME.
    is_path = source.startswith((".", "/", "~")) or source.count("/") != 1
    if given.exists() or is_path or _holds_runs(given.parent):
        raise CraftError(
            f"No policy at {source}.",
            why=f"neither it nor its checkpoints/last/pretrained_model holds a {CONFIG}."
            if given.exists()
            else "there is no such folder.",
            fix="give a LeRobot checkpoint folder, a run, or a Hub name (OWNER/NAME).",
        )
    return None


def _holds_runs(folder: Path) -> bool:
    """Whether runs of craft's lie in a folder, so that its name is hardly an owner on the Hub."""
    return next(folder.glob(f"*/{RUN_CONFIG}"), None) is not None
