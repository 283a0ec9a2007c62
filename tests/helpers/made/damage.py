"""What can happen to a file."""

from pathlib import Path


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5] ^= 16
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def empty(file: Path) -> None:
    file.write_bytes(b"")
