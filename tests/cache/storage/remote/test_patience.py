"""A request to a store that is away is repeated for three minutes; here a second is a minute.

The repeats are obstore's, whose clock nobody can set: all its times are divided by sixty instead.
Real outages of 4, 20, 40 and 60 seconds, and one without end, were tried by hand; see
examples/pages/object_stores.md.
"""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import pytest

from craftcli.cache.storage import remote_folder
from craftcli.cache.storage.base import UnreachableStoreError
from craftcli.cache.storage.remote_folder import Patience, RemoteFolder
from craftcli.locations import RemotePath

FASTER = 60
MISSING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
AWAY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass
class Store:
    """A store that is away until a moment, and has no objects then."""

    server: socket.socket
    drops: bool
    """Whether it hangs up while it is away; otherwise it answers that it is too busy."""
    until: float = float("inf")
    asked: list[float] = field(default_factory=list)

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            with connection:
                self.asked.append(time.monotonic())
                away = time.monotonic() < self.until
                if away and self.drops:
                    continue
                connection.recv(65536)
                connection.sendall(AWAY if away else MISSING)


@pytest.fixture(params=[True, False], ids=["hangs up", "is busy"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(remote_folder, "PATIENCE", Patience().faster(FASTER))
        store = Store(server=server, drops=request.param)
        thread = threading.Thread(target=store.serve)
        thread.start()
        yield store
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def read() -> bytes | None:
    return RemoteFolder(RemotePath("s3://anchors/a.zarr")).read("zarr.json")


def test_the_promise_is_three_minutes() -> None:
    assert Patience().total_s == 180
    assert Patience().longest_wait_s <= 5  # or a store that is back would be noticed late
    faster = asdict(Patience().faster(FASTER))
    assert faster == {name: value / FASTER for name, value in asdict(Patience()).items()}


def test_a_store_that_stays_away_is_given_up_after_three_minutes(store: Store) -> None:
    began = time.monotonic()
    with pytest.raises(UnreachableStoreError, match="cannot be reached"):
        read()
    took_s = (time.monotonic() - began) * FASTER
    assert 180 <= took_s < 300
    assert len(store.asked) > 10  # obstore's own limit
    # It never rests longer than promised; a busy machine adds some tenths of a second of ours.
    waits = [after - before for before, after in zip(store.asked, store.asked[1:], strict=False)]
    assert max(waits) < Patience().longest_wait_s / FASTER + 0.5


@pytest.mark.parametrize("outage_s", [3, 20, 40, 60, 150])
def test_outages_are_waited_out(store: Store, outage_s: int) -> None:
    store.until = time.monotonic() + outage_s / FASTER
    assert read() is None  # the store is back, and says that there is no such object
    assert time.monotonic() >= store.until
