"""How long it takes to read the log of a very long run, and how much memory.

    uv run python tests/benchmarks/long_log.py

Writes a log of a million lines, and does with it what `compare`, `--resume` of a finished run and
`--resume` of a run without digests do.
"""

import argparse
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from craftcli.compare.curves import read_curves
from craftcli.config.train import TrainConfig
from craftcli.engine.metrics import last_entry
from craftcli.engine.resuming import Resumed, forget_later
from craftcli.engine.run_files import METRICS_FILE

# As a run with two layers of hidden states writes them.
ENTRY = {
    **dict.fromkeys(("loss", "grad_norm", "lr", "update_s", "data_s"), 0.12345678901234567),
    **dict.fromkeys(("l_ret", "lam", "epsilon", "dot", "cos"), 0.12345678901234567),
    **dict.fromkeys(("task_norm", "ret_norm", "conflict_rate"), 0.12345678901234567),
    "losses": dict.fromkeys(("hidden", "hidden.vlm.2", "hidden.vlm.3"), 0.12345678901234567),
    "lams": {"joint": 0.12345678901234567},
}


def measure(work: Callable[[], Any]) -> str:
    """Seconds of the processor without, and MiB with tracing."""
    began = time.process_time()
    work()
    used = time.process_time() - began
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return f"{used:.2f} s, {peak / 2**20:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch)
        file = run / METRICS_FILE
        with file.open("w") as log:
            for step in range(1, given.lines + 1):
                own = {"step": step, "steps": given.lines, "mode": "hidden", **ENTRY}
                log.write(json.dumps(own) + "\n")
        resumed = Resumed(
            run=run, config=TrainConfig(), checkpoint=run, state={"step": given.lines}, last=None
        )
        works: dict[str, Callable[[], Any]] = {
            "the curves of compare": lambda: read_curves(file),
            "the last entry": lambda: last_entry(run, steps=given.lines, mode="hidden"),
            "later lines left out": lambda: forget_later(resumed),
        }
        sys.stdout.write(f"{given.lines:,} lines, {file.stat().st_size / 1e6:.0f} MB\n")
        for name, work in works.items():
            sys.stdout.write(f"{name}: {measure(work)}\n")


if __name__ == "__main__":
    main()
