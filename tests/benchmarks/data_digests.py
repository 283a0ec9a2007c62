"""What it costs to compare the data of a run with its checkpoint: digests of all its files.

    uv run python tests/benchmarks/data_digests.py

Writes files as large as LeRobot's videos and reads them whole, in parts, and a second time. They
are in memory when they are read: a disk may be slower than the digests.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from craftcli.engine.file_digests import digest_contents

MB = 10**6


def measure(files: dict[str, Path], whole_bytes: int | None) -> tuple[float, float]:
    """Seconds of the clock and of processors."""
    clock, used = time.perf_counter(), time.process_time()
    digest_contents(files, whole_bytes=whole_bytes)
    return time.perf_counter() - clock, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--mb", type=int, default=200, help="size of a file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        files = {}
        for number in range(given.files):
            files[str(number)] = Path(scratch) / f"{number}.mp4"
            files[str(number)].write_bytes(os.urandom(given.mb * MB))
        total = given.files * given.mb * MB / 1e9
        clock, used = measure(files, None)
        again, _ = measure(files, None)
        parts, parts_used = measure(files, 0)
    sys.stdout.write(
        f"{total:.1f} GB in {given.files} files on {os.cpu_count()} cores: {clock:.1f} s, "
        f"{used:.1f} s of processors ({used / total:.2f} s a GB); again in the same process "
        f"{again * 1000:.1f} ms; in parts {parts * 1000:.0f} ms, {parts_used * 1000:.0f} ms of "
        "processors\n"
    )


if __name__ == "__main__":
    main()
