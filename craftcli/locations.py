"""Where a cache is: a folder, or a place in an object store that a URL names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from craftcli.errors import EXIT_USAGE, CraftError

SCHEMES = ("s3", "gs", "hf")
"""The object stores a cache may be in, by the beginning of their URLs."""


@dataclass(frozen=True)
class RemotePath:
    """A place in an object store, such as s3://bucket/anchors.zarr."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Self:
        return type(self)(f"{self.url}/{name}")

    @property
    def scheme(self) -> str:
        """Which kind of store it is."""
        return self.url.partition("://")[0]

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]


type Location = Path | RemotePath


def locate(path: str | Location) -> Location:
    """What a user meant by a path or a URL.

    Raises:
        CraftError: a URL of a kind that craft does not know, or without a name.
    """
    if isinstance(path, RemotePath):
        return path
    if isinstance(path, Path):
        # Path drops the second slash of a URL, and nobody means a folder that is called s3:.
        if path.parts[:1] in [(f"{scheme}:",) for scheme in SCHEMES]:
            return locate(f"{path.parts[0]}//{'/'.join(path.parts[1:])}")
        return path
    scheme, found, rest = path.partition("://")
    if not found:
        return Path(path)
    parts = [part for part in rest.split("/") if part]
    if scheme not in SCHEMES or len(parts) < 2:
        raise CraftError(
            f"{path} is not a place for a cache.",
            why="it needs a bucket and a name in it."
            if scheme in SCHEMES
            else f"craft knows {', '.join(f'{known}://' for known in SCHEMES)} and folders.",
            fix="give a folder, or a URL such as s3://bucket/anchors.zarr.",
            exit_code=EXIT_USAGE,
        )
    return RemotePath(f"{scheme}://{'/'.join(parts)}")
