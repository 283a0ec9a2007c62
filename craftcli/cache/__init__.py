"""The anchor cache: what a teacher computed for samples of the old data, in a chunked Zarr folder.

format     the arrays and the manifest: start here
identity   compares the teacher and the dataset of a cache with those of a run
variations recipes of rows that no dataset holds; `mixtures` makes them, `made_rows` compares them
           with real ones
row_digests digests of frames that are read from the dataset again
summary    contents and origin of a cache as one object
requests   the forward pass that fills a cache and is compared with it
dtypes, inputs, layers, stats
           stored numbers, model inputs, layer indices, statistics of hidden states
storage/   where a cache lies: local disk or object store, chunks, zarr
reading/   random rows of a complete cache
writing/   chunk by chunk, resumable
build/     runs the teacher over anchors and writes the cache
transfer/  joins, exports and imports caches
"""

from typing import TYPE_CHECKING

from craftcli.lazy_names import lazy_names

if TYPE_CHECKING:
    from craftcli.cache.build.build import build_cache
    from craftcli.cache.format import Manifest
    from craftcli.cache.reading.reader import CacheReader
    from craftcli.cache.summary import CacheSummary, summarize
    from craftcli.cache.writing.writer import CacheWriter

__all__ = [
    "CacheReader",
    "CacheSummary",
    "CacheWriter",
    "Manifest",
    "build_cache",
    "summarize",
]

__getattr__ = lazy_names(
    __name__,
    {
        "CacheReader": "reading.reader",
        "CacheSummary": "summary",
        "CacheWriter": "writing.writer",
        "Manifest": "format",
        "build_cache": "build.build",
        "summarize": "summary",
    },
)
