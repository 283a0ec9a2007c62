"""Opening a LeRobot dataset for a policy, after checks of its format version and features."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from lerobot.datasets import dataset_metadata, lerobot_dataset
from lerobot.datasets.dataset_metadata import CODEBASE_VERSION, LeRobotDatasetMetadata
from lerobot.datasets.factory import resolve_delta_timestamps
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from packaging.version import InvalidVersion, Version

from craftcli.errors import CraftError
from craftcli.local_datasets import INFO_FILE, find_local_dataset, require_dataset
from craftcli.patching import replaced
from craftcli.policies.lerobot.fast_rows import FastRows, number_parts

type TakesSize = Callable[[str, tuple[int, ...]], bool]
"""Whether a policy can read a vector, by its name, in a size that is not its own."""


def open_dataset(
    repo_id: str,
    *,
    root: str | None,
    revision: str | None = None,
    policy_config: Any,
    renames: Mapping[str, str] | None = None,
    takes_size: TakesSize | None = None,
) -> Any:
    """A LeRobotDataset with the action chunks and histories that the policy needs.

    `renames` map the dataset's names to the policy's; `takes_size` says which other sizes of its
    vectors the policy can read.
    """
    local = find_local_dataset(repo_id, root)
    if local:
        check_local_version(local)
    name = repo_id if root or not local else local.resolve().name
    try:
        with _without_hub(local) if local else contextlib.nullcontext():
            meta = LeRobotDatasetMetadata(name, root=local, revision=revision)
            check_version(name, meta.info.codebase_version)
            check_features(policy_config, meta, renames or {}, takes_size)
            dataset = LeRobotDataset(
                name,
                root=local,
                revision=revision,
                delta_timestamps=resolve_delta_timestamps(policy_config, meta),
            )
        check_columns(dataset, policy_config, renames or {})
    except CraftError:
        raise
    except Exception as error:  # LeRobot passes on whatever the Hub and its parsers raise
        if local and _lies_elsewhere(error, local):
            raise
        if local:
            raise CraftError(
                f"Cannot read the dataset {local}.",
                why=f"a file is missing or damaged ({type(error).__name__}: {error}).",
                fix="record or download it again.",
            ) from error
        raise CraftError(
            f"Cannot open the dataset {repo_id!r}.",
            why=f"there is no such folder, and the download from the Hub failed: {error}",
            fix="check the name, or give the folder of a downloaded dataset instead.",
        ) from error
    FastRows.install(dataset)
    return dataset


@contextlib.contextmanager
def _without_hub(folder: Path) -> Iterator[None]:
    """Keep LeRobot from asking the Hub for the files that a local dataset lacks."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        # LeRobot calls this while it handles the error of the missing file.
        missing = sys.exception()
        if missing and _lies_elsewhere(missing, folder):
            raise missing
        raise CraftError(
            f"The dataset {folder} is incomplete.",
            why=f"a file is missing: {missing or 'one of an episode, in data/ or videos/'}.",
            fix="record, copy or download it again.",
        )

    with contextlib.ExitStack() as stack:
        for module in (dataset_metadata, lerobot_dataset):
            for name in ("snapshot_download", "get_safe_version"):
                stack.enter_context(replaced(module, name, refuse))
        yield


def _lies_elsewhere(error: BaseException, folder: Path) -> bool:
    """Whether a file of another folder could not be used: the home of LeRobot's cache, say."""
    name = error.filename if isinstance(error, OSError) else None
    if not isinstance(name, str):
        return False
    return not Path(name).resolve().is_relative_to(folder.resolve())


def check_columns(dataset: Any, policy_config: Any, renames: Mapping[str, str]) -> None:
    """Refuse a dataset whose tables lack values of a column that the policy reads.

    A column that only the info file names is read as one without values.
    """
    problems = []
    for name in _columns_read(dataset, policy_config, renames):
        column = dataset.hf_dataset.data.column(name)
        if column.null_count:
            empty = np.concatenate([chunk.is_null().to_numpy(False) for chunk in column.chunks])
            problems.append(
                f"{name} has no value in {empty.sum():,} of {len(column):,} frames, the first of "
                f"them {np.flatnonzero(empty)[0]}"
            )
    if problems:
        raise CraftError(
            f"The dataset {dataset.root} is incomplete.",
            why=f"in its tables in data/, {'; '.join(problems)}.",
            fix="record or download it again.",
        )


def _columns_read(dataset: Any, policy_config: Any, renames: Mapping[str, str]) -> list[str]:
    """The columns of the dataset's tables that the policy reads."""
    read = {**policy_config.input_features, **policy_config.output_features}
    names: list[str] = dataset.hf_dataset.column_names
    return [name for name in names if renames.get(name, name) in read]


def require_finite(dataset: Any, policy_config: Any, renames: Mapping[str, str]) -> None:
    """Refuse to train on numbers that are NaN or infinite: tokenizers make valid tokens of them."""
    problems = []
    for name in _columns_read(dataset, policy_config, renames):
        parts = number_parts(dataset.hf_dataset.data.column(name)) or []
        bad = [~np.isfinite(part.reshape(len(part), -1)).all(axis=1) for part in parts]
        frames = np.flatnonzero(np.concatenate([np.zeros(0, dtype=bool), *bad]))
        if frames.size:
            first = ", ".join(str(frame) for frame in frames[:5])
            problems.append(f"{name} of {len(frames):,} frames, the first of them {first}")
    if problems:
        raise CraftError(
            f"The dataset {dataset.root} holds numbers that are not finite.",
            why="NaN or infinity is in " + "; in ".join(problems) + ".",
            fix="remove the episodes of these frames (lerobot-edit-dataset), or record them again.",
        )


def open_recorded_dataset(repo_id: str, root: str) -> Any:
    """A local LeRobotDataset as it was recorded, for its identity; no policy is needed."""
    require_dataset(Path(root), fix="put it back there.")
    try:
        with _without_hub(Path(root)):
            return LeRobotDataset(repo_id, root=root)
    except CraftError:
        raise
    except Exception as error:  # as above
        if _lies_elsewhere(error, Path(root)):
            raise
        raise CraftError(
            f"Cannot read the dataset {root}.",
            why=f"a file is missing or damaged ({type(error).__name__}: {error}).",
            fix="record or download it again.",
        ) from error


def check_features(
    policy_config: Any,
    meta: Any,
    renames: Mapping[str, str],
    takes_size: TakesSize | None = None,
) -> None:
    """Refuse a dataset that lacks a feature of the policy, or has it in another shape."""
    problems = [
        f"{old} is renamed to {new}, which it has already"
        for old, new in renames.items()
        if old in meta.features and new in meta.features and new not in renames
    ]
    features = {renames.get(key, key): feature for key, feature in meta.features.items()}
    cameras = policy_config.image_features
    if cameras and not any(key in features for key in cameras):
        problems.append(f"no camera of {', '.join(cameras)} (it has {', '.join(meta.camera_keys)})")
    needed = {**policy_config.input_features, **policy_config.output_features}
    for key, feature in needed.items():
        if key in cameras:
            continue
        have = features.get(key)
        if have is None:
            problems.append(f"no {key}")
        elif tuple(have["shape"]) != tuple(feature.shape) and not (
            takes_size and takes_size(key, tuple(have["shape"]))
        ):
            problems.append(f"{key} is {tuple(have['shape'])}, not {tuple(feature.shape)}")
    if problems:
        raise CraftError(
            f"The dataset {meta.repo_id!r} does not fit the policy.",
            why="; ".join(problems) + ".",
            fix="use the dataset the policy was made for, a policy with these features, or "
            "--rename THEIRS=THE_POLICYS where only names differ.",
        )


def check_local_version(folder: Path) -> None:
    """Refuse a folder in another version of LeRobot's dataset format.

    If its info file cannot be read, LeRobot reports that later.
    """
    try:
        info = json.loads((folder / INFO_FILE).read_text("utf-8"))
        version = str(info["codebase_version"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    check_version(str(folder), version, root=folder)


def check_version(name: str, version: str, *, root: Path | None = None) -> None:
    """Refuse another major version of the format; within one, LeRobot reads all.

    LeRobot itself refuses 2.1, fails on older ones without a reason, and opens newer ones as if
    they were its own.
    """
    own = Version(CODEBASE_VERSION)
    try:
        found = Version(version)
    except InvalidVersion as error:
        raise CraftError(
            f"The dataset {name} cannot be read.",
            why=f"its {INFO_FILE} gives the version {version!r}, which is not a version.",
            fix="record or download it again.",
        ) from error
    if found.major == own.major:
        return
    raise CraftError(
        f"The dataset {name} is in another format.",
        why=f"it is in LeRobot's format v{found}, and the LeRobot installed here reads "
        f"v{own.major}.",
        fix=_fix_newer(own) if found > own else _fix_older(name, found, root),
    )


def _fix_newer(own: Version) -> str:
    return f"update LeRobot and craft, or use a copy in the format v{own.major}."


def _fix_older(name: str, found: Version, root: Path | None) -> str:
    place = f"{root.name} --root={root} --push-to-hub=false" if root else name
    first = "" if found >= Version("2.1") else " (to v2.1 first, with an older LeRobot)"
    converter = "python -m lerobot.scripts.convert_dataset_v21_to_v30"
    return f"convert it with {converter} --repo-id={place}{first}."
