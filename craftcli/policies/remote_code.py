"""Code that comes with a policy's tokenizers: run when the user says so, and never else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

from transformers import dynamic_module_utils

from craftcli.errors import EXIT_USAGE, CraftError


@contextmanager
def remote_code(source: str, *, allowed: bool) -> Iterator[None]:
    """Whether what is loaded inside may bring code of its own.

    LeRobot always tells transformers to trust it. All such code passes one function, which copies
    or fetches it before it is imported.
    """
    if allowed:
        yield
        return

    def refuse(where: Any, module_file: str, *_: Any, **__: Any) -> NoReturn:
        raise CraftError(
            f"The policy {source} needs code that craft does not run unasked.",
            why=f"{where} brings its own Python code, {module_file}.",
            fix="read that code; if you trust it, add --trust-remote-code "
            "(load_checkpoint(..., trust_remote_code=True)).",
            exit_code=EXIT_USAGE,
        )

    with patch.object(dynamic_module_utils, "get_cached_module_file", refuse):
        yield
