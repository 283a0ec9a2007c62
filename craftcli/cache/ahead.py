"""Doing the next piece of work in a thread while the last one is used."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor


def ahead[T, R](work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`work` of every item in order, the next one already under way while one is used.

    One thread, so that work never runs beside itself. An error comes up where its result would
    have; leaving early waits for what is under way and drops it.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting = None
        for item in items:
            following = thread.submit(work, item)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()
