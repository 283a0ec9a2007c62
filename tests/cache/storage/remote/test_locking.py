"""One build at a time into a place in an object store."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import obstore
import pytest
from made.remote_cache import CHUNKS, begin, build, make_begun, raw, rows_of, tree

from craftcli.cache.storage.remote_folder import RemoteFolder
from craftcli.cache.storage.remote_lock import LOCK_FILE, RemoteLock
from craftcli.distributed import Processes
from craftcli.errors import CraftError
from craftcli.locations import RemotePath


def test_the_second_build_is_refused(path: RemotePath, local: Path) -> None:
    manifest = make_begun()
    with begin(path, manifest) as first:
        with pytest.raises(CraftError, match="Another build") as refused:
            build(path, overwrite=True)
        assert f"process {os.getpid()}" in refused.value.why
        for chunk in range(CHUNKS):
            first.write_chunk(chunk, rows_of(manifest, chunk))
        first.finish()
    assert tree(path) == tree(local)


def lock_of(path: RemotePath, **changes: Any) -> None:
    """Leave the lock of some process."""
    lock = RemoteLock(RemoteFolder(path), Processes())
    obstore.put(raw(path), LOCK_FILE, json.dumps(lock.owner | changes).encode())


def test_the_lock_of_a_process_that_died_here_is_taken_over(path: RemotePath, local: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    lock_of(path, process=int(dead.stdout))
    build(path)
    assert tree(path) == tree(local)


@pytest.mark.parametrize("changes", [{"machine": "elsewhere", "host": "far"}, {"process": 1}])
def test_a_lock_that_may_be_alive_stays_and_the_error_says_how_to_remove_it(
    path: RemotePath, changes: dict[str, Any]
) -> None:
    lock_of(path, **changes)
    with pytest.raises(CraftError, match="Another build") as refused:
        build(path)
    assert f"aws s3 rm {path}/{LOCK_FILE}" in refused.value.fix
    assert list(tree(path)) == [LOCK_FILE]
    obstore.delete(raw(path), LOCK_FILE)
    begin(path, make_begun()).__exit__(None, None, None)
    assert tree(path) == {}
