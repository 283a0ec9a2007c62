"""Why craft sets OMP_WAIT_POLICY: steps a second with sleeping over spinning OpenMP threads.

    uv run python tests/benchmarks/thread_wait.py

Two processes share the machine, as when a test suite runs beside a training. Prints the ratio.
"""

import os
import subprocess
import sys

WORK = """
import time, torch
block = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)]
model = torch.nn.Sequential(*block * 4)
data = torch.randn(2304, 64)
for _ in range(3): model(data).sum().backward()
started, count = time.perf_counter(), 0
while time.perf_counter() - started < 8:
    model(data).sum().backward()
    count += 1
print(count / (time.perf_counter() - started))
"""


def rate(policy: str) -> float:
    """Backward passes a second of two processes together, under one waiting policy."""
    environment = {**os.environ, "OMP_WAIT_POLICY": policy}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WORK], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    return sum(float(process.communicate()[0]) for process in running)


def main() -> None:
    """Measure both policies, one after the other."""
    passive, active = rate("PASSIVE"), rate("ACTIVE")
    print(f"passive {passive:.1f}/s, active {active:.1f}/s, ratio {passive / active:.1f}")


if __name__ == "__main__":
    main()
