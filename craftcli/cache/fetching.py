"""Fetching chunks that are not at hand: several at once, and those of the coming rows ahead."""

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from craftcli.cache.chunk_files import ChunkFiles
from craftcli.cache.chunks import Chunks

# Requests to a store are mostly waiting, and codecs leave the interpreter to others.
_AT_ONCE = 8


def is_fetched(chunks: Chunks) -> bool:
    """Whether reading a chunk means to wait for a store or for a codec."""
    return not isinstance(chunks, ChunkFiles)


def lock_for(*, fetched: bool) -> AbstractContextManager[Any]:
    """A lock where two threads would fetch the same; files need none, and fork without harm."""
    return threading.Lock() if fetched else nullcontext()


def map_over[T, R](work: Callable[[T], R], items: Iterable[T], *, fetched: bool) -> Sequence[R]:
    """`work` of every item in order, done at once where it is waiting."""
    return list(_pool("fetch").map(work, items) if fetched else map(work, items))


def begin(work: Callable[[], None]) -> None:
    """Do that soon, in a thread; what goes wrong will go wrong again for whoever needs it."""
    _pool("prefetch").submit(work)


@functools.cache
def _pool(purpose: str) -> ThreadPoolExecutor:
    # One for each purpose, because work of the one waits for work of the other.
    return ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix=f"craft-{purpose}")
