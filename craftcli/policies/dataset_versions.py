"""Which versions of LeRobot's dataset format can be read, told before LeRobot tries."""

import json
from pathlib import Path

from lerobot.datasets.dataset_metadata import CODEBASE_VERSION
from packaging.version import InvalidVersion, Version

from craftcli.errors import CraftError

INFO_FILE = "meta/info.json"


def check_local_version(folder: Path) -> None:
    """Refuse a folder whose data lie in another layout than LeRobot's own.

    A file that cannot be read is left to LeRobot, which says what is wrong with it.
    """
    try:
        info = json.loads((folder / INFO_FILE).read_text("utf-8"))
        version = str(info["codebase_version"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    check_version(str(folder), version, root=folder)


def check_version(name: str, version: str, *, root: Path | None = None) -> None:
    """Refuse another major version; within one, LeRobot reads all.

    LeRobot itself refuses 2.1, gives up without a reason on what is older, and opens what is newer
    as if it were its own.
    """
    own = Version(CODEBASE_VERSION)
    try:
        found = Version(version)
    except InvalidVersion as error:
        raise CraftError(
            f"The dataset {name} cannot be read.",
            why=f"its {INFO_FILE} says version {version!r}, which is none.",
            fix="record or download it again.",
        ) from error
    if found.major == own.major:
        return
    raise CraftError(
        f"The dataset {name} is in another format.",
        why=f"it is in LeRobot's format v{found}, and the LeRobot installed here reads "
        f"v{own.major}.",
        fix=_newer(own) if found > own else _older(name, found, root),
    )


def _newer(own: Version) -> str:
    return f"update LeRobot and craft, or use a copy in the format v{own.major}."


def _older(name: str, found: Version, root: Path | None) -> str:
    place = f"{root.name} --root={root} --push-to-hub=false" if root else name
    first = "" if found >= Version("2.1") else " (to v2.1 first, with an older LeRobot)"
    converter = "python -m lerobot.scripts.convert_dataset_v21_to_v30"
    return f"convert it with {converter} --repo-id={place}{first}."
