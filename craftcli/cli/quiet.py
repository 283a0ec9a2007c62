"""Keeping the libraries' own chatter out of a command's output."""

import logging
import os
import warnings


def set_up_threads() -> None:
    """Let idle OpenMP threads sleep instead of spinning; read when torch is imported.

    On two busy cores a training step of the demo took 2.7 s with spinning threads and 0.15 s with
    sleeping ones (tests/benchmarks/thread_wait.py measures the ratio).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def quiet_libraries(*, debug: bool) -> None:
    """Silence what LeRobot, datasets and transformers print while they work."""
    if debug:
        return
    # Read by these libraries when they are imported.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # LeRobot logs a page of tracebacks when torchcodec finds no FFmpeg, then uses PyAV.
    for name in ("lerobot", "transformers", "datasets", "root"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(lerobot|transformers|datasets|torch)\b")
