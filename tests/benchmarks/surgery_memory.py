"""The memory that surgery takes, as a multiple of one copy of the gradients.

    uv run python tests/benchmarks/surgery_memory.py

The retention gradient itself is one copy; what is printed is that copy and the most that surgery
has allocated at any moment besides, as torch's profiler records every allocation.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from craftcli.choices import Merge
from craftcli.engine.method.projection import project_and_merge_

WIDTH = 512
LAYERS = 12


def make_gradients(layers: int, dtype: torch.dtype, *, transposed: bool) -> list[Tensor | None]:
    """Gradients with the shapes of a transformer; the first parameter has none."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> Tensor:
        if transposed:
            return torch.randn(columns, rows, generator=generator).to(dtype).t()
        return torch.randn(rows, columns, generator=generator).to(dtype)

    shapes = [(8 * WIDTH, WIDTH)]
    for _ in range(layers):
        shapes += [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (1, WIDTH)]
    return [None, *(draw(*shape) for shape in shapes)]


def peak_bytes(trace: dict[str, Any]) -> int:
    """The most bytes that were allocated at once since the trace began."""
    changes = [event for event in trace["traceEvents"] if event.get("name") == "[memory]"]
    held, peak = 0, 0
    for event in sorted(changes, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def operation_peak(operation: Callable[[], object]) -> int:
    """The most bytes that an operation has allocated at once."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        operation()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return peak_bytes(json.loads(path.read_text()))


def measure(*, layers: int, dtype: torch.dtype, transposed: bool = False, groups: int = 1) -> float:
    """Retention gradients and what surgery adds to them, over one copy of the gradients."""
    task = make_gradients(layers, dtype, transposed=transposed)
    ret = make_gradients(layers, dtype, transposed=False)
    copy = sum(g.nbytes for g in ret if g is not None)
    peak = operation_peak(
        lambda: project_and_merge_(
            task,
            ret,
            threshold=0.0,
            project=True,
            merge=Merge.EQUAL,
            lam=1.0,
            groups=[number % groups for number in range(len(task))],
        )
    )
    return (copy + peak) / copy


def main() -> None:
    """Measure every precision and layout of memory."""
    for dtype in (torch.float32, torch.bfloat16):
        for transposed in (False, True):
            for groups in (1, LAYERS):
                ratio = measure(layers=LAYERS, dtype=dtype, transposed=transposed, groups=groups)
                layout = "transposed" if transposed else "contiguous"
                name = str(dtype).removeprefix("torch.")
                print(f"{name:9} {layout:11} {groups:2} groups: {ratio:.3f} copies")


if __name__ == "__main__":
    main()
