"""The fronts of the packages: every public name is there, and is what the module defines."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import craftcli

ROOT = Path(craftcli.__file__).parent
FRONTS = sorted(
    ".".join(("craftcli", *file.parent.relative_to(ROOT).parts))
    for file in ROOT.rglob("__init__.py")
)


@pytest.mark.parametrize("package", FRONTS)
def test_every_public_name_can_be_imported(package: str) -> None:
    front = import_module(package)
    assert front.__doc__
    for name in getattr(front, "__all__", ()):
        # A module of the same name would hide what the front exports.
        assert not isinstance(getattr(front, name), ModuleType), f"{package}.{name}"
