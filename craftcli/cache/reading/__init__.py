"""Reads random rows of a complete cache.

reader     `CacheReader`, the way to read a cache
rows       the rows of one array: in memory, mapped or fetched
packed_rows  the rows of a packed array
file_sizes finds mapped files that were made shorter
checksums  compares every chunk with its commit record at its first use
prefetch   threads for chunks that have to be fetched or decoded
"""

from craftcli.cache.reading.reader import MEMORY, CacheReader

__all__ = ["MEMORY", "CacheReader"]
