"""Where a cache lies, and how its bytes get there.

base               what a cache needs: the files of a folder, a destination, a lock
by_location        chooses between local disk and object store
local_folder       files on a disk, made durable with fsync
local_destination  built as `<path>.partial`, then moved to `<path>`
own_files          which files of a cache craft wrote itself
local_lock         one build at a time, by locks that end with their processes
remote_folder, remote_destination, remote_lock
                   the same for s3://, gs:// and hf://
chunks             shape, checksum and commit record of chunks
chunk_files        chunks in local files, mapped into memory
whole_chunks       chunks that are fetched from a store or decoded by zarr
packed_chunks      chunks that leave out the empty slots of rows
zarr_layout        the Zarr group and its arrays
"""

from typing import TYPE_CHECKING

from craftcli.lazy_names import lazy_names

if TYPE_CHECKING:
    from craftcli.cache.storage.base import (
        BuildLock,
        CacheFolder,
        Destination,
        InterruptedBuild,
        UnreachableStoreError,
    )
    from craftcli.cache.storage.by_location import open_destination, open_folder
    from craftcli.cache.storage.chunks import ArraySpec, Chunks, DamagedChunkError, RowArrays
    from craftcli.cache.storage.zarr_layout import OpenedCache, open_cache, required_arrays

__all__ = [
    "ArraySpec",
    "BuildLock",
    "CacheFolder",
    "Chunks",
    "DamagedChunkError",
    "Destination",
    "InterruptedBuild",
    "OpenedCache",
    "RowArrays",
    "UnreachableStoreError",
    "open_cache",
    "open_destination",
    "open_folder",
    "required_arrays",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ArraySpec": "chunks",
        "BuildLock": "base",
        "CacheFolder": "base",
        "Chunks": "chunks",
        "DamagedChunkError": "chunks",
        "Destination": "base",
        "InterruptedBuild": "base",
        "OpenedCache": "zarr_layout",
        "RowArrays": "chunks",
        "UnreachableStoreError": "base",
        "open_cache": "zarr_layout",
        "open_destination": "by_location",
        "open_folder": "by_location",
        "required_arrays": "zarr_layout",
    },
)
