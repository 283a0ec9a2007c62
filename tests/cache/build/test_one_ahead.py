"""Work done ahead comes in order, once, and fails where it belongs."""

import threading
import time

import pytest

from craftcli.cache.build.build import map_one_ahead


def test_results_come_in_order() -> None:
    assert list(map_one_ahead(lambda n: n * n, range(6))) == [0, 1, 4, 9, 16, 25]
    assert list(map_one_ahead(lambda n: n, [])) == []


def test_the_next_is_under_way_while_one_is_used() -> None:
    started: list[int] = []

    def work(number: int) -> int:
        started.append(number)
        return number

    results = map_one_ahead(work, range(5))
    assert next(results) == 0
    while len(started) < 2:  # ends only if the second began without being asked for
        time.sleep(0.001)
    assert started == [0, 1]
    results.close()


def test_work_never_runs_beside_itself() -> None:
    inside = threading.Lock()

    def work(number: int) -> int:
        assert inside.acquire(blocking=False)
        time.sleep(0.002)
        inside.release()
        return number

    assert list(map_one_ahead(work, range(10))) == list(range(10))


def test_an_error_comes_up_in_its_place() -> None:
    def work(number: int) -> int:
        if number == 2:
            raise ValueError("two")
        return number

    results = map_one_ahead(work, range(5))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(results)
