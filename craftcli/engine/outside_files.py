"""Which files of a dataset and of a policy a run reads, outside its own folder.

LeRobot's layout, without importing LeRobot: `craft inspect` looks at runs whose data may be gone.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_TABLES = (".json", ".jsonl", ".parquet")
_DATASET_FOLDERS: dict[str, tuple[str, ...] | None] = {
    "meta": _TABLES,
    "data": _TABLES,
    "images": None,
    "videos": None,
}
"""The folders of a dataset, the smallest first, and the endings of files that are read there."""
_POLICY_FILES = (".json", ".safetensors", ".model", ".txt")
_RECORDS = ("train_config.json",)
"""Written by a training, and read by none."""
_TOKENIZERS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""A folder with one of these belongs to the policy that it lies in."""


def dataset_files(root: Path) -> dict[str, Path]:
    """The files of a LeRobot dataset that a training may read, by their paths in it.

    All videos count, because LeRobot decodes those of every camera.
    """
    return {
        file.relative_to(root).as_posix(): file
        for folder, endings in _DATASET_FOLDERS.items()
        for file in _files_below(root / folder)
        if endings is None or file.suffix in endings
    }


def policy_files(folder: Path) -> dict[str, Path]:
    """The files of a policy with its processors and tokenizers, by their paths in its folder.

    Other folders in it are left out: a user may keep runs there.
    """
    own = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
    tokenizers = [entry for entry in own if any((entry / name).is_file() for name in _TOKENIZERS)]
    files = [entry for entry in own if entry.is_file() and entry.name not in _RECORDS]
    files += [file for place in tokenizers for file in _files_below(place)]
    named = {file.relative_to(folder).as_posix(): file for file in files}
    return {name: file for name, file in named.items() if file.suffix in _POLICY_FILES}


def _files_below(folder: Path) -> Iterator[Path]:
    """All files in order, hidden ones left out; links are followed, as LeRobot follows them."""
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place) / name for name in sorted(names) if not name.startswith("."))
