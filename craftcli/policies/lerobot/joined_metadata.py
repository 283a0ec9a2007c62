"""The metadata of several datasets together, by the names that LeRobot's metadata has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lerobot.datasets.compute_stats import aggregate_stats
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedMeta:
    """The metadata of several datasets together, by the names of LeRobotDatasetMetadata."""

    repo_id: str
    features: dict[str, dict[str, Any]]
    """The features that all have, in one shape."""
    stats: dict[str, dict[str, Any]]
    total_episodes: int
    total_frames: int
    fps: int
    camera_keys: list[str]
    image_keys: list[str]
    video_keys: list[str]
    has_language_columns: bool
    tasks: Any
    """The table of the instructions, as LeRobot has it."""
    episodes: dict[str, list[int]]
    """Where each episode begins and ends, in the common count of frames."""

    @classmethod
    def of(
        cls, parts: Sequence[Any], names: Sequence[Mapping[str, str]], offsets: NDArray[np.int64]
    ) -> "JoinedMeta":
        """Join the metadata of opened datasets; `names` are their own names of common features."""
        metas = [part.meta for part in parts]
        features = _common_features(metas, names)
        found = [task for meta in metas for task in meta.tasks.index]
        tasks = list(dict.fromkeys(map(str, found)))
        cameras = [key for key, about in features.items() if about["dtype"] in ("image", "video")]
        in_videos = {
            key
            for key in cameras
            if any(own.get(key, key) in m.video_keys for m, own in zip(metas, names, strict=True))
        }
        return cls(
            repo_id="+".join(meta.repo_id for meta in metas),
            features=features,
            stats=_joined_stats(metas, names, features),
            total_episodes=sum(meta.total_episodes for meta in metas),
            total_frames=sum(meta.total_frames for meta in metas),
            fps=metas[0].fps,
            camera_keys=cameras,
            image_keys=[key for key in cameras if key not in in_videos],
            video_keys=[key for key in cameras if key in in_videos],
            has_language_columns=all(meta.has_language_columns for meta in metas),
            tasks=metas[0].tasks.reindex(tasks).assign(task_index=range(len(tasks))),
            episodes={
                edge: [
                    int(row + first)
                    for meta, first in zip(metas, offsets, strict=False)
                    for row in meta.episodes[edge]
                ]
                for edge in ("dataset_from_index", "dataset_to_index")
            },
        )


def own_names(features: Mapping[str, Any], renames: Mapping[str, str]) -> dict[str, str]:
    """A dataset's own names of features that have another name in the joined dataset.

    --rename OLD=NEW is for datasets with the name OLD. Where a dataset has NEW already, the feature
    is called OLD in the joined one, so that the policy's preprocessor renames it in all frames.
    """
    return {old: new for old, new in renames.items() if old not in features and new in features}


def feature_shape(features: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """The shape of a feature; that of a picture with its colours last."""
    if name not in features:
        return None
    shape = tuple(features[name]["shape"])
    is_picture = features[name]["dtype"] in ("image", "video")
    return (*shape[1:], shape[0]) if is_picture and shape[0] < shape[-1] else shape


def _common_features(
    metas: Sequence[Any], names: Sequence[Mapping[str, str]]
) -> dict[str, dict[str, Any]]:
    """The features of the first dataset that all have in its shape, by their common names."""
    first = {own: common for common, own in names[0].items()}
    found = {first.get(key, key): about for key, about in metas[0].features.items()}

    def shapes(key: str) -> set[tuple[int, ...] | None]:
        each = zip(metas, names, strict=True)
        return {feature_shape(meta.features, own.get(key, key)) for meta, own in each}

    return {key: about for key, about in found.items() if len(shapes(key)) == 1}


def _joined_stats(
    metas: Sequence[Any], names: Sequence[Mapping[str, str]], features: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The joined statistics of the features that have statistics in every dataset."""
    every = [
        {key: (meta.stats or {}).get(own.get(key, key)) for key in features}
        for meta, own in zip(metas, names, strict=True)
    ]
    known = [key for key in features if all(stats[key] for stats in every)]
    joined: dict[str, dict[str, Any]] = aggregate_stats(
        [{key: stats[key] for key in known} for stats in every]
    )
    return joined
