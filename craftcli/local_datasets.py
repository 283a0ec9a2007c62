"""Finds the folder of a dataset on this machine. Nothing heavy is imported, so it fails quickly."""

import os
from pathlib import Path

from craftcli.errors import CraftError

INFO_FILE = "meta/info.json"


def find_local_dataset(
    name: str, root: str | None = None, *, option: str = "--dataset"
) -> Path | None:
    """The folder of a LeRobot dataset: `root`, or `name` if it is one; else LeRobot finds it.

    `option` is the one that named it, for the error.

    Raises:
        CraftError: it can only be a folder, and that holds no dataset.
    """
    if root is not None:
        fix = f"give {option}-root the folder that holds meta/ and data/."
        return require_dataset(Path(root).expanduser(), fix=fix)
    folder = Path(name).expanduser()
    fix = f"give {option} a folder that holds meta/ and data/, or a Hub name."
    if folder.is_dir() or (can_only_be_local(name) and not _is_known_to_lerobot(name)):
        return require_dataset(folder, fix=fix, named=name)
    return None


def require_dataset(folder: Path, *, fix: str, named: str | None = None) -> Path:
    """The folder, if it holds a LeRobot dataset; `named` is how the user wrote it.

    Raises:
        CraftError: it does not.
    """
    if not (folder / INFO_FILE).is_file():
        raise CraftError(
            f"No LeRobot dataset at {named or folder}.",
            why=f"the folder has no {INFO_FILE}."
            if folder.is_dir()
            else "there is no such folder.",
            fix=fix,
        )
    return folder


def can_only_be_local(name: str) -> bool:
    """Whether a name is a path: names on the Hub begin otherwise and have one slash at most.

    >>> [can_only_be_local(name) for name in ("./pick", "data/my/pick", "me/pick", "pick")]
    [True, True, False, False]
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _is_known_to_lerobot(name: str) -> bool:
    """Whether LeRobot has the dataset in its own folder, where names may have more slashes."""
    # A light import, which knows HF_HOME and its default.
    from huggingface_hub.constants import HF_HOME

    home = Path(os.environ.get("HF_LEROBOT_HOME", Path(HF_HOME) / "lerobot")).expanduser()
    return (home / name).is_dir()
