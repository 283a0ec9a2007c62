"""Keeps the logs, warnings and progress bars of other libraries out of a command's output."""

import logging
import os
import re
import warnings
from collections.abc import Callable


def set_up_threads() -> None:
    """Let idle OpenMP threads sleep instead of spin; torch reads this when it is imported.

    Two processes on two cores did 2.1 times the work with sleeping threads (2026-11-16,
    tests/benchmarks/thread_wait.py); under more load the difference was larger.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def quiet_libraries(*, debug: bool) -> None:
    """Silence what LeRobot, datasets and transformers print; with `debug`, leave them alone."""
    if debug:
        return
    # These libraries read the variables when they are imported.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # When torchcodec finds no FFmpeg, LeRobot logs a page of tracebacks and then uses PyAV.
    logging.getLogger("lerobot.utils.import_utils").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger().addFilter(_first_of_each_kind())
    # LeRobot's own code passes this argument, once for every file that it reads.
    warnings.filterwarnings("ignore", message="Cannot enable progress bars")
    # LeRobot's molmoact2 calls it whenever a policy is opened.
    warnings.filterwarnings("ignore", message="`rope_config_validation` is deprecated")


def _first_of_each_kind() -> Callable[[logging.LogRecord], bool]:
    """A log filter that drops repetitions; LeRobot repeats some warnings for every sample.

    It also drops a warning of pi0_fast about a key that it then loads correctly.
    """
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        kind = re.sub(r"\d+", "#", message)
        if kind in seen or message.startswith("Vision embedding key might need handling"):
            return False
        seen.add(kind)
        return True

    return is_new
