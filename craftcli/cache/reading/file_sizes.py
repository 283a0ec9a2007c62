"""Sizes of mapped files, checked before every read.

Reading past the end of a mapped file kills the process (SIGBUS). So the size of a file is checked
before each read, which takes about 2 µs. Only a file that is made shorter between this check and
the read still kills the process.
"""

import os
from collections.abc import Iterable

from craftcli.cache.storage.chunk_files import ChunkFiles
from craftcli.cache.storage.packed_chunks import PackedFiles


class FileSizes:
    """Finds mapped files that were made shorter since they were mapped."""

    def __init__(self, files: ChunkFiles | PackedFiles) -> None:
        self._files = files
        self._watched: dict[int, tuple[str, int, int]] = {}

    def watch(self, chunk: int, used: int) -> None:
        """Remember which file is mapped, and how many of its bytes are read."""
        path = str(self._files.file(chunk))
        self._watched[chunk] = (path, os.stat(path).st_ino, used)

    def check(self, chunks: Iterable[int]) -> None:
        """Raise a DamagedChunkError if a file ends before its last row."""
        for chunk in chunks:
            path, inode, used = self._watched[chunk]
            try:
                found = os.stat(path)
            except OSError:
                continue  # removed or replaced: the mapping keeps the old file whole
            if found.st_size < used and found.st_ino == inode:
                self._files.fail(chunk, "the file was made shorter while the cache was open")
