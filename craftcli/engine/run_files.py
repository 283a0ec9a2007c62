"""The files of a run and of an interpolated policy: their names, and which craft writes itself.

All others belong to the user: --overwrite refuses a folder with such files and removes none.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from craftcli.config.run_paths import CONFIG_FILE as CONFIG_FILE
from craftcli.whole_files import foreign_files_error

STATE_FILE = "craft_state.json"
MANIFEST_FILE = "craft_manifest.json"
"""The digests of a checkpoint, in its folder."""
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
CHECKPOINTS = "checkpoints"
LAST = "last"
"""In `CHECKPOINTS`: a link to the last checkpoint."""
BEST = "best"
"""In `CHECKPOINTS`: a link to the best checkpoint of a run that was measured while it trained."""
EVALUATIONS_FOLDER = "evaluations"
"""Folder of evaluations, in the folder of a run or of an interpolated policy."""
MERGE_FILE = "craft_merge.json"
"""How an interpolated policy was made; a folder with this file may be replaced."""
REPLACES_FILE = "craft_replaces.json"
"""In a run that is not finished: the name of the folder with the run that it replaces."""

_LEFT_OVER = r"\.[^/]+\.[0-9a-f]{16}\.(partial|replaced)(/.*)?"
_EVALUATION = rf"{EVALUATIONS_FOLDER}/((teacher|earlier)/)?[^/]+\.json"
_OF_RUN = re.compile(
    r"(craft_[a-z_]+|summary|live_teacher)\.json|metrics\.jsonl|craft\.lock"
    r"|[^/]+_retained_weights\.safetensors|(tensorboard|wandb|set-aside-from-\d+(-\d+)?)/.*"
    rf"|{CHECKPOINTS}/({LAST}|{BEST})|{_EVALUATION}|({CHECKPOINTS}/|{EVALUATIONS_FOLDER}/)?{_LEFT_OVER}"
)
_OF_CHECKPOINT = re.compile(rf"{CHECKPOINTS}/(\d+)/(.+)")
# Of merges by an earlier version, which listed no files.
_OF_POLICY = re.compile(r"[^/]+\.(json|safetensors)|README\.md")


def is_left_over(name: str) -> bool:
    """Whether a file of a run is a temporary one, which a killed process leaves."""
    return re.fullmatch(_LEFT_OVER, name) is not None


def require_own_run(folder: Path) -> None:
    """Refuse to replace a run with files that craft did not write.

    Raises:
        CraftError: it has such files; the error names them.
    """
    listed: dict[str, set[str] | None] = {}

    def is_own(name: str) -> bool:
        found = _OF_CHECKPOINT.fullmatch(name)
        if not found:
            return _OF_RUN.fullmatch(name) is not None
        step, file = found.groups()
        if step not in listed:
            listed[step] = _listed(folder / CHECKPOINTS / step / MANIFEST_FILE)
        names = listed[step]
        return names is None or file in names or file == MANIFEST_FILE

    _refuse(folder, [name for name in _files(folder) if not is_own(name)])


def require_own_merge(folder: Path) -> None:
    """Refuse to replace an interpolated policy with files that craft did not write.

    Raises:
        CraftError: it has such files; the error names them.
    """
    listed, evaluation = _listed(folder / MERGE_FILE), re.compile(_EVALUATION)

    def is_own(name: str) -> bool:
        known = _OF_POLICY.fullmatch(name) if listed is None else name in listed
        return bool(known or name == MERGE_FILE or evaluation.fullmatch(name))

    _refuse(folder, [name for name in _files(folder) if not is_own(name)])


def _listed(file: Path) -> set[str] | None:
    """The files that a list of digests names; None if it is of an earlier version, or damaged."""
    try:
        return set(json.loads(file.read_text("utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _files(folder: Path) -> Iterator[str]:
    """Files and links below a folder; links are not followed."""
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in (*links, *files):
            yield (Path(place) / name).relative_to(folder).as_posix()


def _refuse(folder: Path, foreign: list[str]) -> None:
    if foreign:
        raise foreign_files_error(folder, sorted(foreign))
