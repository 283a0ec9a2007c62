"""Instructions: whether a policy reads them, and those that a dataset has, without its frames."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.processor import TokenizerProcessorStep

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.local_datasets import INFO_FILE
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.datasets import check_local_version, check_version


def reads_instructions(policy: Checkpoint) -> bool:
    """Whether the policy's inputs depend on the instruction of a frame."""
    steps = getattr(policy.preprocess, "steps", ())
    return any(isinstance(step, TokenizerProcessorStep) for step in steps)


def instructions_of(dataset: Any) -> list[str]:
    """The instructions of an opened dataset."""
    return [str(task) for task in dataset.meta.tasks.index]


def instructions_of_frames(dataset: Any, frames: Sequence[int]) -> list[str]:
    """The instruction of each of these frames of a dataset."""
    numbers = dataset.hf_dataset.data.column("task_index").to_numpy()
    tasks = dataset.meta.tasks.reset_index(names="task").set_index("task_index")["task"]
    return [str(tasks[numbers[frame]]) for frame in frames]


def read_instructions(source: str) -> tuple[str, ...]:
    """The instructions in a text file, one a line, or those of a LeRobot dataset.

    Of a dataset (a folder, or a name on the Hub) only the metadata are read, not the frames.
    """
    path = Path(source).expanduser()
    found = _lines(path) if path.is_file() else _task_names(source, path)
    kept = tuple(dict.fromkeys(line.strip() for line in found if line.strip()))
    if not kept:
        raise _refused(source, "it has no instruction.")
    return kept


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(str(file), f"{error}.") from error


def _task_names(source: str, folder: Path) -> list[str]:
    local = folder.is_dir()
    if local and not (folder / INFO_FILE).is_file():
        raise _refused(source, f"the folder has no {INFO_FILE}, so that it is no LeRobot dataset.")
    if local:
        check_local_version(folder)
    elif source.count("/") != 1 or folder.is_absolute():
        raise _refused(source, "there is no such file or folder, and it is no name on the Hub.")
    try:
        meta = LeRobotDatasetMetadata(
            folder.resolve().name if local else source, root=folder if local else None
        )
        check_version(source, meta.info.codebase_version)
        return [str(task) for task in meta.tasks.index]
    except CraftError:
        raise
    except Exception as error:  # LeRobot passes on whatever the Hub and its parsers raise
        why = "a file of its metadata is missing or damaged" if local else "no such file or folder"
        raise _refused(source, f"{why} ({type(error).__name__}: {error}).") from error


def _refused(source: str, why: str) -> CraftError:
    return CraftError(
        f"Cannot read the old instructions from {source}.",
        why=why,
        fix="give --old-tasks a text file with one instruction a line, or a LeRobot dataset.",
        exit_code=EXIT_USAGE,
    )
