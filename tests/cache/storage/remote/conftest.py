"""A moto server on loopback that is asked as S3 would be."""

import os
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from made.remote_cache import Bucket, build, raw, served, tree

from craftcli.cache.storage import remote_folder
from craftcli.cache.storage.remote_folder import Patience
from craftcli.locations import RemotePath


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with served() as found, pytest.MonkeyPatch.context() as patch:
        # A store that is gone is given up soon, and local copies need not survive a power cut.
        patch.setattr(remote_folder, "PATIENCE", Patience(total_s=0.5))
        patch.setattr(os, "fsync", lambda _: None)
        yield found


@pytest.fixture
def path(bucket: Bucket) -> RemotePath:
    return bucket.new_path()


@pytest.fixture(scope="module")
def local(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same cache on a disk."""
    path = tmp_path_factory.mktemp("local") / "a.zarr"
    build(path)
    return path


@pytest.fixture
def uploaded(local: Path, path: RemotePath) -> RemotePath:
    """That cache copied to the store, which is quicker than to build it there."""
    for name, data in tree(local).items():
        obstore.put(raw(path), name, data)
    return path
