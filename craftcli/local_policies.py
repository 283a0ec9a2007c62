"""Finds the folder of a policy on this machine. Nothing heavy is imported, so it fails quickly."""

from pathlib import Path

from craftcli.errors import CraftError

CONFIG = "config.json"
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
    # A name on the Hub has one slash at most.
    if given.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise CraftError(
            f"No policy at {source}.",
            why=f"neither it nor its checkpoints/last/pretrained_model holds a {CONFIG}."
            if given.exists()
            else "there is no such folder.",
            fix="give --policy a LeRobot checkpoint folder, a run, or a Hub name.",
        )
    return None
