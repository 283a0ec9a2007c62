"""Two processes that share what this one has imported: LeRobot takes half a minute to import."""

import os
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def together(work: Callable[[], None]) -> None:
    """Do the same in two processes, which torch can connect, and wait for both."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    children = []
    for rank in (0, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none of them is used
            child = os.fork()
        if child == 0:
            with _in_child(rank, port):
                work()
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


@contextmanager
def _in_child(rank: int, port: int) -> Iterator[None]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", **where}
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
