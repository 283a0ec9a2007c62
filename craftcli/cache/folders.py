"""What a cache asks of the place it is in, and the answer of a folder on a local disk."""

import contextlib
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from craftcli.cache.chunk_files import ChunkFiles
from craftcli.cache.chunks import ArraySpec, Chunks
from craftcli.cache.disk import disk_full, sync
from craftcli.locations import Location


class Folder(Protocol):
    """Files by their name below the cache; a name has slashes, whatever the place."""

    @property
    def path(self) -> Location:
        """Where it is."""
        ...

    @property
    def store(self) -> Any:
        """What zarr opens."""
        ...

    def chunks(self, name: str, rows: int, chunk_rows: int, spec: ArraySpec) -> Chunks:
        """The chunks of an array whose encoding is raw rows and their crc32c."""
        ...

    def read(self, name: str) -> bytes | None:
        """A file; None if there is none."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file, or replace it."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def remove_tree(self, name: str) -> None:
        """Remove everything below a name."""
        ...

    def sweep(self) -> None:
        """Remove the temporary files of a killed process."""
        ...

    def persist(self, names: Iterable[str]) -> None:
        """Return once those files would survive a loss of power."""
        ...

    def guard(self, need: int = 0) -> AbstractContextManager[None]:
        """Turn what the place itself may raise into an error that helps; `need` as `disk_full`."""
        ...

    def mark(self) -> object:
        """What tells the cache that is here from another that takes its place."""
        ...

    def size(self) -> int:
        """Bytes of all files."""
        ...

    def modified(self) -> datetime:
        """When the cache was last changed."""
        ...


class LocalFolder:
    """A folder; `cache` is what the user calls it while it is built under another name."""

    def __init__(self, path: Path, *, cache: Path | None = None) -> None:
        self.path = path
        self._cache = cache or path

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"LocalFolder({str(self.path)!r})"

    @property
    def store(self) -> Path:
        """What zarr opens."""
        return self.path

    def chunks(self, name: str, rows: int, chunk_rows: int, spec: ArraySpec) -> ChunkFiles:
        """Chunks that are mapped into memory."""
        return ChunkFiles(root=self.path, name=name, rows=rows, chunk_rows=chunk_rows, spec=spec)

    def read(self, name: str) -> bytes | None:
        """A file; None if there is none."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file, or replace it."""
        (self.path / name).write_bytes(data)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def remove_tree(self, name: str) -> None:
        """Remove everything below a name."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def sweep(self) -> None:
        """Remove the temporary files of a killed process."""
        # Zarr writes a file under such a name first.
        for leftover in self.path.rglob("*.partial"):
            if leftover.is_file():
                leftover.unlink()

    def persist(self, names: Iterable[str]) -> None:
        """Return once those files would survive a loss of power."""
        sync(self.path, [self.path / name for name in names])

    def guard(self, need: int = 0) -> AbstractContextManager[None]:
        """Name the disk when it is full."""
        return disk_full(self._cache, need) if need else contextlib.nullcontext()

    def mark(self) -> object:
        """What tells the cache that is here from another that takes its place."""
        try:
            found = (self.path / "zarr.json").stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def modified(self) -> datetime:
        """When the cache was last changed."""
        return datetime.fromtimestamp((self.path / "zarr.json").stat().st_mtime, UTC)
