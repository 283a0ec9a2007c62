"""The rows of the dataset that anchors were taken from, as the teacher saw them."""

import copy
import threading
from typing import Any

from torch import Tensor

from craftcli.cache.format import DatasetIdentity
from craftcli.errors import CraftError
from craftcli.policies.base import Batch
from craftcli.policies.data import open_dataset, read_rows, remember_if_small
from craftcli.policies.identity import dataset_identity
from craftcli.policies.loading import Checkpoint


class AnchorRows:
    """Reads frames again from the dataset and runs them through the teacher's preprocessor.

    For images that stayed there, and for labels, which no cache holds.
    """

    def __init__(self, dataset: Any, policy: Checkpoint) -> None:
        self._dataset = remember_if_small(dataset)
        self._policy = policy
        # A pipeline keeps state while it runs, and this one runs beside the task's, in a thread.
        self._preprocess = copy.deepcopy(policy.preprocess)
        self._reading = threading.Lock()

    def read_labelled(self, dataset_indices: list[int]) -> Batch:
        """All of these frames as the policy takes them, with the data's own actions."""
        # One at a time: a batch out of turn is asked for while the thread prepares the next.
        with self._reading:
            batch: Batch = self._preprocess(read_rows(self._dataset, dataset_indices))
        return batch

    def read_images(self, dataset_indices: list[int]) -> dict[str, Tensor]:
        """The images of these frames by input name."""
        batch = self.read_labelled(dataset_indices)
        keys = self._policy.adapter.image_keys(self._policy.policy, batch)
        return {key: batch[key] for key in keys}


def open_anchor_rows(
    identity: DatasetIdentity, policy: Checkpoint, *, root: str | None
) -> AnchorRows:
    """Open the dataset a cache points into, and refuse another one or a changed one."""
    try:
        dataset = open_dataset(
            identity.repo_id,
            root=root or identity.root,
            policy_config=policy.policy.config,
            renames=policy.renames,
        )
    except CraftError as error:
        raise CraftError(
            "The images of the anchors are not to be had.",
            why=f"the cache points into the dataset {identity.repo_id}: {error.what} {error.why}",
            fix="give its folder with --anchor-root, or rebuild the cache with --images embed.",
        ) from error
    found = dataset_identity(dataset, [])
    if found.fingerprint != identity.fingerprint:
        raise CraftError(
            f"The dataset {identity.repo_id} is not the one the cache was built from.",
            why=f"fingerprint is {found.fingerprint[:12]} ({found.frames} frames) instead of "
            f"{identity.fingerprint[:12]} ({identity.frames} frames).",
            fix="give the right one with --anchor-root, or rebuild the cache.",
        )
    return AnchorRows(dataset, policy)
