"""Writes a cache chunk by chunk; a killed build loses at most the chunks that were not committed.

writer      `CacheWriter`: commits chunks, then finishes the cache
unfinished  the cache before it is finished: created, resumed, which chunks are committed
checks      refuses arrays and rows that do not fit the manifest
"""

from craftcli.cache.writing.unfinished import Resumable
from craftcli.cache.writing.writer import CacheWriter

__all__ = ["CacheWriter", "Resumable"]
