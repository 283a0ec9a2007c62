"""Keeping the libraries' own chatter out of a command's output."""

import logging
import os
import re
import warnings
from collections.abc import Callable


def set_up_threads() -> None:
    """Let idle OpenMP threads sleep instead of spinning; read when torch is imported.

    Two processes on two cores did 2.1 times the work with sleeping threads (2026-11-16,
    tests/benchmarks/thread_wait.py); under more load the difference was larger.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def quiet_libraries(*, debug: bool) -> None:
    """Silence what LeRobot, datasets and transformers print while they work."""
    if debug:
        return
    # Read by these libraries when they are imported.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A page of tracebacks when torchcodec finds no FFmpeg, after which LeRobot uses PyAV.
    logging.getLogger("lerobot.utils.import_utils").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger().addFilter(_once_and_worth_it())
    # Passed by LeRobot's own code, once for every file it reads.
    warnings.filterwarnings("ignore", message="Cannot enable progress bars")


def _once_and_worth_it() -> Callable[[logging.LogRecord], bool]:
    """Let a warning through the first time; LeRobot repeats some for every sample.

    pi0_fast warns of a key on every load, and loads it correctly.
    """
    seen: set[str] = set()

    def wanted(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        kind = re.sub(r"\d+", "#", message)
        if kind in seen or message.startswith("Vision embedding key might need handling"):
            return False
        seen.add(kind)
        return True

    return wanted
