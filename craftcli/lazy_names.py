"""Public names of a package that are imported when they are first used.

Some packages hold light modules beside heavy ones: torch and LeRobot take many seconds to import,
and `craft --help` needs neither.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562) that looks up a name in the module that defines it.

    `homes` maps each public name to its module below `package`, such as "reading.reader".
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find
