"""What a policy folder may contain: checked before LeRobot reads it.

LeRobot imports whatever `class` a processor file names and calls it with `config`, so that opening
a folder could run any program. Here a folder chooses among the processor steps that LeRobot,
installed plugins and the running program define. Nothing is imported because a file names it.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lerobot.processor import ProcessorStep, ProcessorStepRegistry

from craftcli.errors import CraftError
from craftcli.policies.lerobot.lora_files import LORA_CONFIG


def check_policy_files(folder: Path, config: Any) -> None:
    """Refuse a policy folder whose files name anything but known processor steps.

    `config` is the policy's configuration; the module with the processor of its type is imported,
    because it may define steps. It belongs to the package that registered the type.

    Raises:
        CraftError: a file names a class, a step or a file that a policy may not use.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module(type(config).__module__.replace("configuration_", "processor_"))
    for file in sorted(folder.glob("*.json")):
        content = _read(file)
        for number, entry in enumerate(_steps(file, content)):
            _check_step(file, number, entry)
        if file.name == LORA_CONFIG:
            _check_lora(file, content)


def _steps(file: Path, content: Any) -> list[Any]:
    """The steps of a processor file; other files have none, such as LeRobot's train_config.json."""
    steps = content.get("steps") if isinstance(content, dict) else None
    if isinstance(steps, list) and all(isinstance(entry, dict) for entry in steps):
        return steps
    if file.name.endswith("processor.json"):
        raise _refused(file, "steps is not a list of processor steps")
    return []


def _check_step(file: Path, number: int, entry: dict[str, Any]) -> None:
    if "registry_name" in entry:
        name, known = entry["registry_name"], ProcessorStepRegistry.list()
        if name not in known:
            raise _refused(file, f"step {number} is {name!r}, which nobody registered with LeRobot")
    elif "class" in entry:
        name = entry["class"]
        if not isinstance(name, str) or name not in _unregistered_steps():
            raise _refused(
                file, f"step {number} names the class {name!r}, which is not a processor step"
            )
    state = entry.get("state_file")
    if state is not None and (not isinstance(state, str) or Path(state).name != state):
        raise _refused(file, f"step {number} reads {state!r}, a file outside the policy's folder")
    beside = entry.get("artifacts") or {}
    for path in beside.values() if isinstance(beside, dict) else [beside]:
        if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise _refused(file, f"step {number} opens {path!r}, not in the policy's folder")


def _unregistered_steps() -> set[str]:
    """The steps that are defined now, by the name that LeRobot writes if they have no other."""
    found: set[str] = set()
    for step in _subclasses(ProcessorStep):
        # LeRobot looks the name up in its module, where something else may stand by now.
        if getattr(sys.modules.get(step.__module__), step.__name__, None) is step:
            found.add(f"{step.__module__}.{step.__name__}")
    return found


def _subclasses(base: type) -> Iterator[type]:
    known: list[type] = base.__subclasses__()
    for found in known:
        yield found
        yield from _subclasses(found)


def _check_lora(file: Path, content: Any) -> None:
    if not isinstance(content, dict):
        return
    if content.get("megatron_config"):
        raise _refused(file, "megatron_config makes PEFT import the module megatron_core")
    # Other kinds open tokenizers and further weights that the file names.
    if content.get("peft_type", "LORA") != "LORA":
        raise _refused(file, f"peft_type is {content['peft_type']!r}, and craft opens LORA alone")


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CraftError(
            f"The policy file {file} cannot be read.",
            why=f"{type(error).__name__}: {error}.",
            fix="save or download the checkpoint again.",
        ) from error


def _refused(file: Path, why: str) -> CraftError:
    return CraftError(
        f"Refusing to open the policy in {file.parent}: it could run code of its own.",
        why=f"in {file.name}, {why}.",
        fix="if you trust the policy, install the package that defines the step and registers it "
        "with LeRobot (its name begins with lerobot_policy_); otherwise do not use the policy.",
    )
