"""Threads for chunks that have to be waited for: several at once, and the next ones early."""

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from craftcli.cache.storage.chunk_files import ChunkFiles
from craftcli.cache.storage.chunks import Chunks
from craftcli.cache.storage.packed_chunks import PackedFiles

# Requests to a store are mostly waiting, and codecs release the interpreter lock.
_AT_ONCE = 8


def is_fetched(chunks: Chunks) -> bool:
    """Whether reading a chunk waits for an object store or a codec."""
    return not isinstance(chunks, ChunkFiles | PackedFiles)


def lock_for(*, fetched: bool) -> AbstractContextManager[Any]:
    """A lock where two threads could fetch the same chunk; files need none, and stay fork-safe."""
    return threading.Lock() if fetched else nullcontext()


def map_over[T, R](work: Callable[[T], R], items: Iterable[T], *, fetched: bool) -> Sequence[R]:
    """Apply `work` to every item, in parallel where it waits; results keep their order."""
    return list(_pool("fetch").map(work, items) if fetched else map(work, items))


def run_in_background(work: Callable[[], None]) -> None:
    """Run in a thread. Errors are dropped here: the foreground read raises them again."""
    _pool("prefetch").submit(work)


@functools.cache
def _pool(purpose: str) -> ThreadPoolExecutor:
    # One for each purpose: background work waits for fetches, which need threads of their own.
    return ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix=f"craft-{purpose}")
