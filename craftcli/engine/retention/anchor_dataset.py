"""The dataset that anchors were taken from, read again as the teacher saw it."""

import copy
import functools
import threading
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from craftcli.cache.mixtures import mix_images
from craftcli.cache.row_digests import Digester, FrameDigests
from craftcli.cache.variations import Variations
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.policies.base import Batch
from craftcli.policies.identity import DatasetIdentity
from craftcli.policies.lerobot.batches import read_rows, remember_if_small
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.datasets import open_dataset
from craftcli.policies.lerobot.identity import dataset_identity
from craftcli.policies.lerobot.several_datasets import SeveralDatasets
from craftcli.policies.lerobot.task_processors import takes_size


class AnchorDataset:
    """Reads frames from the dataset and runs them through the policy's preprocessor.

    Needed for images that the cache does not hold, and for labels, which no cache holds.
    """

    def __init__(self, dataset: Any, policy: Checkpoint) -> None:
        self._digester = Digester(dataset)
        self._digests: FrameDigests | None = None
        self._dataset = remember_if_small(dataset)
        self._policy = policy
        # A copy, because a pipeline keeps state while it runs, and this one runs in a thread while
        # the task's runs in another.
        self._preprocess = copy.deepcopy(policy.preprocess)
        self._reading = threading.Lock()

    def read_labelled(self, dataset_indices: list[int]) -> Batch:
        """These frames as input for the policy, with the dataset's actions as labels."""
        # One call at a time: a batch may be needed while the thread prepares another.
        with self._reading:
            batch: Batch = self._preprocess(self._read(dataset_indices, labels=True))
        return batch

    def read_images(
        self, dataset_indices: list[int], variations: Variations | None = None
    ) -> dict[str, Tensor]:
        """The images of these frames by input name; `variations` are the recipes of made rows."""
        with self._reading:
            raw = self._read(dataset_indices)
            if variations is not None:
                # A row that is no mixture has no partner; the frame itself takes its place.
                known = variations.partners >= 0
                second = np.where(known, variations.partners, dataset_indices)
                partners = self._read(second.tolist())
                mix_images(raw, partners, variations, self._dataset.meta.camera_keys)
            batch = self._preprocess(raw)
        return self._policy.adapter.images(self._policy.policy, batch)

    def check_with(self, digests: FrameDigests | None) -> None:
        """From now on refuse frames that do not have these digests."""
        self._digests = digests

    def _read(self, dataset_indices: list[int], *, labels: bool = False) -> Batch:
        batch = read_rows(self._dataset, dataset_indices)
        if self._digests:
            self._digests.check(dataset_indices, batch, self._digester, labels=labels)
        return batch


def open_anchor_dataset(
    datasets: DatasetIdentity | tuple[DatasetIdentity, ...],
    policy: Checkpoint,
    *,
    root: str | None,
) -> AnchorDataset:
    """Open the dataset, or the datasets, that a cache refers to; refuse another or a changed one.

    `root` is the folder of the dataset if it has moved; of several datasets, the folder that holds
    those of all.
    """
    wanted = datasets if isinstance(datasets, tuple) else (datasets,)
    parts = [
        _open_part(identity, policy, root=folder)
        for identity, folder in zip(wanted, anchor_folders(wanted, root), strict=True)
    ]
    if len(parts) == 1:
        return AnchorDataset(parts[0], policy)
    # Weights decide which frames are drawn, and these are drawn already.
    weights = [None] * len(parts)
    return AnchorDataset(SeveralDatasets(parts, weights=weights, renames=policy.renames), policy)


def anchor_folders(datasets: tuple[DatasetIdentity, ...], root: str | None) -> list[str | None]:
    """The folders of the datasets of a cache; `root` is where they have moved to, if they have."""
    if root is None or len(datasets) == 1:
        return [root or identity.root for identity in datasets]
    names = (Path(identity.root or identity.repo_id).name for identity in datasets)
    return [str(Path(root) / name) for name in names]


def _open_part(identity: DatasetIdentity, policy: Checkpoint, *, root: str | None) -> Any:
    try:
        dataset = open_dataset(
            identity.repo_id,
            root=root,
            policy_config=policy.policy.config,
            renames=policy.renames,
            takes_size=functools.partial(takes_size, policy, None),
        )
    except CraftError as error:
        raise CraftError(
            "Cannot open the dataset of the anchors.",
            why=f"the cache refers to {identity.repo_id}: {error.what} {error.why}",
            fix="give its folder with --anchor-root, or rebuild the cache with --images embed.",
        ) from error
    found = dataset_identity(dataset, [])
    if found.fingerprint != identity.fingerprint:
        raise CraftError(
            f"The dataset {identity.repo_id} is not the one the cache was built from.",
            why=f"its fingerprint is {found.fingerprint[:12]} ({found.frames} frames), the cache "
            f"has {identity.fingerprint[:12]} ({identity.frames} frames).",
            fix="give the right one with --anchor-root, or rebuild the cache.",
            exit_code=EXIT_CHECK_FAILED,
        )
    return dataset
