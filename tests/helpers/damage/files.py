"""Faults of a disk: one file is not what was written."""

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = ("flip", "flip", "cut", "zeros", "delete", "swap")
"""Flips are the hardest to notice, and come twice as often."""


@dataclass(frozen=True, kw_only=True)
class FileFault:
    """One file and what happens to it."""

    kind: str
    file: Path
    where: int = 0
    """The bit that is flipped, or the bytes that are left."""
    other: Path | None = None
    """The file of the same size that it is swapped with."""

    def __str__(self) -> str:
        return f"{self.kind} {self.where or self.other or ''} of {self.file}"


def files_below(folder: Path) -> list[Path]:
    """All files, links left out."""
    entries = sorted(folder.rglob("*"))
    return [entry for entry in entries if entry.is_file() and not entry.is_symlink()]


def contents_of(folder: Path) -> dict[str, bytes]:
    """All files by their paths; where a merge says its own name, that is left out."""
    files = {str(f.relative_to(folder)): f.read_bytes() for f in files_below(folder)}
    return {name: own for name, own in files.items() if name != "craft_merge.json"}


def random_fault(files: Sequence[Path], dice: random.Random) -> FileFault:
    """A fault of any file; half of them by size, so that large files are hit all over."""
    sizes = [file.stat().st_size for file in files]
    (file,) = dice.choices(files, sizes if dice.random() < 0.5 else None)
    size, kind = file.stat().st_size, dice.choice(KINDS)
    if kind == "swap":
        same = [f for f, own in zip(files, sizes, strict=True) if own == size and f != file]
        same = [other for other in same if other.read_bytes() != file.read_bytes()]
        if same:
            return FileFault(kind=kind, file=file, other=dice.choice(same))
        kind = "flip"
    if kind in ("flip", "cut") and not size:
        kind = "delete"
    ends = {"flip": 8 * size, "cut": size}
    return FileFault(kind=kind, file=file, where=dice.randrange(ends[kind]) if kind in ends else 0)


@contextlib.contextmanager
def damaged(fault: FileFault) -> Iterator[None]:
    """The files with the fault, which leaves no other trace; as they were afterwards."""
    touched = [file for file in (fault.file, fault.other) if file]
    before = {file: (file.read_bytes(), file.stat()) for file in touched}
    folder = fault.file.parent.stat()
    try:
        _do(fault, before[fault.file][0])
        for file, (_, stat) in before.items():
            if file.exists():
                os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        yield
    finally:
        for file, (content, stat) in before.items():
            file.write_bytes(content)
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        os.utime(fault.file.parent, ns=(folder.st_atime_ns, folder.st_mtime_ns))


def _do(fault: FileFault, content: bytes) -> None:
    match fault.kind:
        case "flip":
            changed = bytearray(content)
            changed[fault.where // 8] ^= 1 << fault.where % 8
            fault.file.write_bytes(changed)
        case "cut":
            fault.file.write_bytes(content[: fault.where])
        case "zeros":
            fault.file.write_bytes(bytes(len(content)))
        case "delete":
            fault.file.unlink()
        case "swap" if fault.other:
            fault.file.write_bytes(fault.other.read_bytes())
            fault.other.write_bytes(content)
        case _:
            raise ValueError(fault.kind)
