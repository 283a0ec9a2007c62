"""The files of a cache on a local disk: read, written, and made durable with fsync."""

import contextlib
import errno
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path

from craftcli.cache.storage.chunk_files import ChunkFiles
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.own_files import remove_temporary
from craftcli.cache.storage.packed_chunks import PackedFiles
from craftcli.errors import CraftError
from craftcli.whole_files import sync_path


class LocalFolder:
    """A folder; `cache` is the user's name for it while it is built under another name."""

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

    def chunks(
        self, name: str, rows: int, chunk_rows: int, spec: ArraySpec, *, packed: bool = False
    ) -> ChunkFiles | PackedFiles:
        """Chunks that are mapped into memory."""
        kind = PackedFiles if packed else ChunkFiles
        return kind(root=self.path, name=name, rows=rows, chunk_rows=chunk_rows, spec=spec)

    def read(self, name: str) -> bytes | None:
        """Read a file; None if there is none."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def file_size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        try:
            return (self.path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file, or replace it."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        (self.path / name).unlink(missing_ok=True)

    def remove_tree(self, name: str) -> None:
        """Remove everything below a name."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def remove_temporary_files(self) -> None:
        """Remove the temporary files of a killed process; a user's own `*.partial` stay."""
        remove_temporary(self.path)

    def make_durable(self, names: Iterable[str]) -> None:
        """Return once these files would survive a loss of power."""
        sync_files(self.path, [self.path / name for name in names])

    def explain_errors(self, need: int = 0) -> AbstractContextManager[None]:
        """Name the disk when it is full."""
        return explain_full_disk(self._cache, need) if need else contextlib.nullcontext()

    def version_mark(self) -> object:
        """A value that changes when another cache takes the place of this one."""
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


def sync_files(root: Path, files: Iterable[Path]) -> None:
    """Fsync files below `root`, and the folders that lead to them."""
    folders: set[Path] = {root}
    for file in files:
        sync_path(file)
        folder = file.parent
        while folder not in folders:
            folders.add(folder)
            folder = folder.parent
    for folder in folders:
        sync_path(folder)


@contextlib.contextmanager
def explain_full_disk(path: Path, need: int) -> Iterator[None]:
    """Turn a full disk into an error that names `need`, the size of the whole cache in bytes."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        disk = next(folder for folder in path.parents if folder.is_mount())
        raise CraftError(
            f"The disk is full, {path} was not written.",
            why=f"the cache needs {_size(need)} in all; the disk at {disk} has room for "
            f"{_size(shutil.disk_usage(path.parent).free)} more, with the unfinished build on it.",
            fix="free space, choose a path on another disk, or keep fewer samples or layers.",
        ) from error


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e3:.1f} kB"
