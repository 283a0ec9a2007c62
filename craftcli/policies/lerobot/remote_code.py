"""Python code that comes with the files of a policy: it runs only if the user allows it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

from peft.tuners.lora import tp_layer
from transformers import dynamic_module_utils

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.patching import replaced


@contextmanager
def remote_code(source: str, *, allowed: bool) -> Iterator[None]:
    """Refuse remote code inside the block unless it is allowed.

    LeRobot always passes trust_remote_code=True to transformers, and has no setting for it. So
    three functions refuse here:

    - `get_cached_module_file`, which copies or downloads all remote code before it is imported;
    - `check_imports`, which it calls for each file, for modules that hold the original by its name;
    - the import of a module that LoRA weights name; no policy of LeRobot's needs that.
    """
    if allowed:
        yield
        return

    def refuse(where: Any, module_file: str, *_: Any, **__: Any) -> NoReturn:
        raise _refused(source, f"{where} brings its own Python code, {module_file}.")

    def refuse_file(file: Any) -> NoReturn:
        raise _refused(source, f"a model that it names brings its own Python code, {file}.")

    def refuse_module(name: Any) -> NoReturn:
        raise _refused(source, f"its LoRA weights make PEFT import the module {name}.")

    with (
        replaced(dynamic_module_utils, "get_cached_module_file", refuse),
        replaced(dynamic_module_utils, "check_imports", refuse_file),
        replaced(tp_layer, "importlib", SimpleNamespace(import_module=refuse_module)),
    ):
        yield


def load_lazy_tokenizers(*pipelines: Any) -> None:
    """Load now what a step would load at its first batch, when nothing refuses remote code.

    Only LeRobot's step for GR00T loads so late, but any policy may use that step.
    """
    for pipeline in pipelines:
        for step in pipeline.steps:
            _ = getattr(step, "proc", None)


def _refused(source: str, why: str) -> CraftError:
    return CraftError(
        f"The policy {source} needs remote code, which craft does not run by default.",
        why=why,
        fix="read that code; if you trust it, add --trust-remote-code "
        "(load_checkpoint(..., trust_remote_code=True)).",
        exit_code=EXIT_USAGE,
    )
