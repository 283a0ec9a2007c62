"""Where a cache is: a local folder, or the URL of a place in an object store."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from craftcli.errors import EXIT_USAGE, CraftError

SCHEMES = ("s3", "gs", "hf")
"""The schemes of the URLs that a cache may have."""


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
        """The kind of store: s3, gs or hf."""
        return self.url.partition("://")[0]

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]


type Location = Path | RemotePath


def locate(path: str | Location) -> Location:
    """Turn a path or a URL into a location.

    Raises:
        CraftError: the scheme of the URL is unknown, or the URL has no name after the bucket.
    """
    if isinstance(path, RemotePath):
        return path
    if isinstance(path, Path):
        # Path drops the second slash of a URL. Nobody has a folder called s3:, so it was a URL.
        if path.parts[:1] in [(f"{scheme}:",) for scheme in SCHEMES]:
            return locate(f"{path.parts[0]}//{'/'.join(path.parts[1:])}")
        return path
    scheme, found, rest = path.partition("://")
    if not found:
        return Path(path)
    parts = [part for part in rest.split("/") if part]
    if scheme not in SCHEMES or len(parts) < 2:
        raise CraftError(
            f"{path} cannot be the location of a cache.",
            why="the URL needs a bucket and a name in it."
            if scheme in SCHEMES
            else f"craft supports {', '.join(f'{known}://' for known in SCHEMES)} and folders.",
            fix="give a folder, or a URL such as s3://bucket/anchors.zarr.",
            exit_code=EXIT_USAGE,
        )
    return RemotePath(f"{scheme}://{'/'.join(parts)}")
