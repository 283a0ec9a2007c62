"""What it costs to check frames that are read again: their digests, beside reading them.

python tests/benchmarks/row_digests.py
"""

import functools
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from craftcli.cache.row_digests import BRIGHTNESS, IMAGES, Digester

REPEATS = 20


def best_ms(work: Callable[[], Any], rows: int) -> float:
    """Milliseconds a row, the best of some rounds: other programs only make it slower."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times) / rows * 1000


def main() -> None:
    torch.set_num_threads(1)
    rows = 8
    meta = SimpleNamespace(camera_keys=["camera"], video_keys=["camera"])
    digester = Digester(SimpleNamespace(meta=meta, delta_timestamps=None, _video_backend="pyav"))
    for size in (48, 96, 224, 480):
        batch = {"camera": torch.rand(rows, 3, size, size)}
        exact = best_ms(functools.partial(digester.digest, batch, [IMAGES]), rows)
        coarse = best_ms(functools.partial(digester.digest, batch, [BRIGHTNESS]), rows)
        sys.stdout.write(
            f"{size} x {size}: {exact:.2f} ms a row by digest, {coarse:.2f} ms by brightness\n"
        )


if __name__ == "__main__":
    main()
