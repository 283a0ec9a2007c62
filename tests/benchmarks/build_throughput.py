"""How much of a build is the teacher: rows a second of `build_cache` over a bare forward loop.

    uv run python tests/benchmarks/build_throughput.py

The bare loop runs the same teacher over the same batches, already read and preprocessed, and keeps
nothing. Where the teacher has to decode its own actions first, so does the bare loop, by LeRobot's
own `predict_action_chunk`; the ratio to a forward pass alone is printed too. Both in one process,
alternating, median of the ratios. The demo's teacher is made wider (random weights), because a real
one takes longer for a row than reading it does.
"""

import os
import shutil
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import typer
from table import Row

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from craftcli.cache.build.anchor_selection import select_rows
from craftcli.cache.build.build import build_cache
from craftcli.choices import Pooling
from craftcli.config.cache import CacheConfig
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.modeling_tiny_pi0_fast import TinyPI0FastPolicy
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.sources import open_anchor_data, open_policy


def wide_teacher(folder: Path, width: int) -> Any:
    """The demo's policy with other sizes, saved and opened as any checkpoint is."""
    shutil.copytree(TEACHER_FOLDER, folder)
    config = load_checkpoint(str(folder), device="cpu").policy.config
    config.width, config.mlp_dim, config.head_dim, config.depth = width, 4 * width, width // 4, 8
    TinyPI0FastPolicy(config).save_pretrained(folder)
    return load_checkpoint(str(folder), device="cpu")


def rows(*, quick: bool) -> list[Row]:
    """The teacher's bare loop over a build, for layers that need all of the teacher."""
    demo = CacheConfig()
    dataset = open_anchor_data(demo, open_policy(demo))
    settings = {
        "kind": "hidden",
        "samples": 16 if quick else 640,
        "batch_size": 8 if quick else 32,
        "layers": "-2,-1",
        "pooling": Pooling.ACTION_TOKENS,
        "actions": "data",
    }
    with tempfile.TemporaryDirectory() as scratch:
        teacher = wide_teacher(Path(scratch) / "teacher", 64 if quick else 512)
        output = Path(scratch) / "a.zarr"
        ratio = measure(teacher, dataset, settings, 1 if quick else 3, output, decoding=False)
    return [
        Row(
            compared="build: a build / the teacher's bare loop",
            measure="wall clock",
            ratio=1 / ratio,
        )
    ]


def main(samples: int = 640, batch_size: int = 32, rounds: int = 2, width: int = 512) -> None:
    """Print the ratio for layers that need the whole stack, and for early ones."""
    demo = CacheConfig()
    dataset = open_anchor_data(demo, open_policy(demo))
    print(f"{date.today()}, {os.cpu_count()} cores, {samples} rows, width {width}")
    with tempfile.TemporaryDirectory() as scratch:
        teacher = wide_teacher(Path(scratch) / "teacher", width)
        for layers, pooling, actions in (
            ("-2,-1", Pooling.ACTION_TOKENS, "data"),
            ("-2,-1", Pooling.ACTION_TOKENS, "teacher"),  # which it has to decode first
            ("2,3", Pooling.VISION_TEXT, "teacher"),  # and need not here
        ):
            settings = {
                "kind": "hidden",
                "samples": samples,
                "batch_size": batch_size,
                "layers": layers,
                "pooling": pooling,
                "actions": actions,
            }
            told = f"layers {layers}, {pooling}, actions of the {actions}"
            output = Path(scratch) / "a.zarr"
            decodes = pooling is Pooling.ACTION_TOKENS and actions == "teacher"
            for decoding in (False, True) if decodes else (False,):
                ratio = measure(teacher, dataset, settings, rounds, output, decoding=decoding)
                bare = "decoding and forward" if decoding else "forward"
                print(f"{told}: build over bare {bare} {ratio:.2f}x")


def measure(
    teacher: Any, dataset: Any, settings: Any, rounds: int, output: Path, *, decoding: bool
) -> float:
    """Median of (seconds of the bare loop) / (seconds of the build)."""
    config = CacheConfig(**settings, output=output, overwrite=True)
    rows = select_rows(config, dataset)
    size = config.batch_size
    batches = [
        teacher.preprocess(read_rows(dataset, rows[start : start + size]))
        for start in range(0, len(rows), size)
    ]
    ratios = []
    for _ in range(rounds):
        started = time.perf_counter()
        teacher.policy.eval()
        with torch.no_grad():
            for batch in batches:
                if decoding:
                    teacher.policy.predict_action_chunk(batch)
                teacher.policy(batch)
        forward = time.perf_counter() - started
        started = time.perf_counter()
        build_cache(config, teacher, dataset, on_plan=lambda _: None, on_rows=lambda _: None)
        ratios.append(forward / (time.perf_counter() - started))
    return median(ratios)


if __name__ == "__main__":
    typer.run(main)
