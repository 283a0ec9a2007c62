"""Digests of the content of files: of one, and of all that a run reads of a dataset or a policy.

A change of any byte is noticed. Reading terabytes would take hours, however: files beyond the first
`WHOLE_BYTES` are compared by their size and by `PARTS` parts, and their digests say so.
"""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

WHOLE_BYTES = 20 * 10**9
"""Bytes of a dataset that are read whole."""
PARTS = 4
"""Parts that are read of a larger file, evenly spaced; the first and the last are its ends.

Few, because a terabyte has thousands of files.
"""
PART_BYTES = 2**20
_IN_PARTS = "parts:"
"""Before the digest of a file of which only parts were read."""

new_digest = partial(hashlib.blake2b, digest_size=16)

type _Version = tuple[str, bool, int, int, int, int]
# Of this process: the runs of a sweep share their data. The time at which a file's entry last
# changed (ctime) is part of the key, because any program can set the time of its content.
_known: dict[_Version, str] = {}


def file_digest(file: Path) -> str:
    """Digest of the bytes of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, new_digest).hexdigest()


def digest_contents(
    files: Mapping[str, Path],
    like: Mapping[str, str] | None = None,
    *,
    whole_bytes: int | None = None,
) -> dict[str, str]:
    """The digest of every file by its name.

    With `whole_bytes`, files are read whole up to so many bytes together, in their order, and in
    parts from there on. Those that `like` has a digest of are read as they were for that, so that
    the two compare.

    Raises:
        OSError: a file cannot be read.
    """
    in_parts = _choose_parts(files, like or {}, whole_bytes)
    # Hashing releases Python's lock, so that threads use all cores.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = pool.map(lambda name: _digest(files[name], in_parts=name in in_parts), files)
        return dict(zip(files, digests, strict=True))


def read_in_parts(digests: Mapping[str, str]) -> list[str]:
    """The files of which only parts were read."""
    return [name for name, digest in digests.items() if digest.startswith(_IN_PARTS)]


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Which files have changed, are missing or were added, in words."""
    changed = [
        f"{name} has changed" if name in now else f"{name} is missing"
        for name, digest in before.items()
        if now.get(name) != digest
    ]
    return [*changed, *(f"{name} was added" for name in now if name not in before)]


def _choose_parts(
    files: Mapping[str, Path], like: Mapping[str, str], whole_bytes: int | None
) -> frozenset[str]:
    if whole_bytes is None:
        return frozenset()
    chosen, total = set(read_in_parts(like)), 0
    for name, file in files.items():
        size = file.stat().st_size
        total += size
        # The parts of a small file are all of it.
        if name not in like and total > whole_bytes and size > PARTS * PART_BYTES:
            chosen.add(name)
    return frozenset(chosen)


def _digest(file: Path, *, in_parts: bool) -> str:
    stat = file.stat()
    times = (stat.st_mtime_ns, stat.st_ctime_ns)
    version = (str(file.resolve()), in_parts, stat.st_ino, stat.st_size, *times)
    if version not in _known:
        _known[version] = _parts_digest(file, stat.st_size) if in_parts else file_digest(file)
    return _known[version]


def _parts_digest(file: Path, size: int) -> str:
    digest = new_digest(str(size).encode())
    end = max(size - PART_BYTES, 0)
    with file.open("rb") as content:
        for number in range(PARTS):
            content.seek(end * number // (PARTS - 1))
            digest.update(content.read(PART_BYTES))
    return _IN_PARTS + digest.hexdigest()
