"""Craft on a system without fcntl, resource and the C library's mmap, as Windows is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import craftcli

TESTS = Path(__file__).parents[1]
FIXTURE = TESTS / "cache/fixtures/all_kinds.zarr"
SYSTEM_MODULES = {"fcntl", "msvcrt", "resource", "ctypes", "pwd", "grp", "termios"}

IMPORT_ALL = """
import importlib, pkgutil
import craftcli

found = [module.name for module in pkgutil.walk_packages(craftcli.__path__, "craftcli.")]
for name in found:
    if name != "craftcli.__main__":
        importlib.import_module(name)
assert len(found) > 100, found
assert not craftcli.system.file_mapping.SIDE_BY_SIDE
"""

BUILD_AND_READ = """
from pathlib import Path

import numpy as np
from craftcli.cache.reading.reader import CacheReader
from craftcli.system.file_mapping import SIDE_BY_SIDE
from made.files import tree
from made.fixed_cache import TASKS, fixed_arrays, fixed_manifest, fixed_rows
from made.rows import write_rows

path, fixture = map(Path, sys.argv[1:])
assert not SIDE_BY_SIDE
write_rows(path, fixed_manifest(), fixed_arrays(), fixed_rows(), tasks=TASKS)
same, fixed = tree(path), tree(fixture)
# The manifest has fields that the fixture's version had not.
assert {**same, "zarr.json": b""} == {**fixed, "zarr.json": b""}
assert [entry.name for entry in path.parent.iterdir()] == [path.name]
for memory in ("ram", "mmap"):
    reader = CacheReader.open(path, memory=memory)
    assert reader.verify() == []
    for name, values in fixed_rows().items():
        np.testing.assert_array_equal(reader.read(name, np.array([9, 0, 4])), values[[9, 0, 4]])
        np.testing.assert_array_equal(reader.read_all(name), values)
"""

TWO_BUILDS = """
import os, subprocess
from pathlib import Path

from craftcli.cache.storage.local_lock import LocalLock
from craftcli.distributed import Processes
from craftcli.errors import CraftError

path, role = Path(sys.argv[1]), sys.argv[2]


def start(role):
    return subprocess.run([*sys.orig_argv[:-1], role], capture_output=True, text=True).stdout


lock = LocalLock(path, Processes(rank=int(role == "second rank"), world=2))
try:
    if role == "second rank":
        lock.join()
    else:
        lock.acquire()
except CraftError as error:
    print("refused" if "Another build" in str(error) else error)
    sys.exit()
print("locked")
if role == "first":
    assert start("other build") == start("second rank") == "refused\\n"
    lock.admit()
    assert start("other build") == "refused\\n"
    assert start("second rank") == "locked\\n"
    # Nothing holds the file any more, and the next build takes it.
    lock.release(done=True)
    assert start("other build") == "locked\\n"
"""


def run(code: str, *arguments: Path | str) -> str:
    """Run Python in a process of its own in which craft finds nothing of Unix."""
    paths = [str(TESTS / "helpers")]
    start = f"import sys\nsys.path[:0] = {paths!r}\nimport hidden_unix\nhidden_unix.hide()\n"
    command = [sys.executable, "-c", start + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_module_is_imported() -> None:
    run(IMPORT_ALL)


def test_a_cache_is_built_and_read_to_the_same_bytes(tmp_path: Path) -> None:
    run(BUILD_AND_READ, tmp_path / "a.zarr", FIXTURE)


def test_builds_are_locked_out(tmp_path: Path) -> None:
    assert run(TWO_BUILDS, tmp_path / "a.zarr", "first") == "locked\n"


def test_one_package_knows_the_modules_of_systems() -> None:
    root = Path(craftcli.__file__).parent
    users = set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if SYSTEM_MODULES.intersection(name.partition(".")[0] for name in names):
                users.add(file.relative_to(root).parts[0])
    assert users == {"system"}
