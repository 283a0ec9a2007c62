"""Versions and hardware, found without importing anything heavy."""

import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import Any

_PACKAGE = "craftcli"
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a report of a problem has to say."""

    craft: str
    python: str
    platform: str
    cpus: int
    gpus: tuple[str, ...]
    """Name, memory and driver, as the driver tells them."""
    packages: dict[str, str | None]
    """Versions of what craft needs; None where it is not installed."""
    extras: dict[str, dict[str, str | None]]
    """The same for each optional extra."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def describe_machine() -> Machine:
    """Look at this machine and this environment."""
    needed, extras = _requirements()
    return Machine(
        craft=version(_PACKAGE),
        python=platform.python_version(),
        platform=platform.platform(),
        cpus=os.cpu_count() or 1,
        gpus=_gpus(),
        packages={name: _version(name) for name in needed},
        extras={extra: {name: _version(name) for name in names} for extra, names in extras.items()},
    )


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """The packages that craft needs, and those of its extras, from its own metadata."""
    about = metadata(_PACKAGE)
    needed: list[str] = []
    extras: dict[str, list[str]] = {name: [] for name in about.get_all("Provides-Extra") or []}
    for requirement in about.get_all("Requires-Dist") or []:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if name:
            (extras[extra[1]] if extra else needed).append(name[0])
    return needed, extras


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpus() -> tuple[str, ...]:
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return ("Apple, by Metal (mps)",)
    if shutil.which(_QUERY[0]) is None:
        return ()
    asked = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=False)
    return tuple(line.strip() for line in asked.stdout.splitlines() if asked.returncode == 0)
