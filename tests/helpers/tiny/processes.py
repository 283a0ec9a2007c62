"""Two processes that share what this one has imported: LeRobot takes half a minute to import."""

import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable


def together(work: Callable[[], None]) -> None:
    """Do the same in two processes, which torch can connect, and wait for both."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_run, args=(work, rank, port)) for rank in (0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none of them is used
        for child in children:
            child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]


def _run(work: Callable[[], None], rank: int, port: int) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", **where}
    work()
