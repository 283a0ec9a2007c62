"""What the tests of examples share."""

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METAWORLD = ROOT / "examples/metaworld_forgetting"
SCRIPTS = {ROOT / "tests/benchmarks", *(run.parent for run in ROOT.glob("examples/*/run.py"))}
"""Folders whose modules import each other by bare names."""


@pytest.fixture(autouse=True)
def own_modules() -> Iterator[None]:
    """Forget modules of scripts before and after: several folders have a `table` or a `teacher`."""
    _forget_scripts()
    yield
    _forget_scripts()


def _forget_scripts() -> None:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).parent in SCRIPTS and "." not in name:
            del sys.modules[name]


@pytest.fixture
def run_metaworld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a script of the Meta-World example, which reports in tables.md."""
    monkeypatch.syspath_prepend(METAWORLD)
    options = ["--quick", "--work", str(tmp_path / "work"), "--tables", str(tmp_path / "tables.md")]

    def run_script(name: str, *more: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *options, *more])
        with pytest.raises(SystemExit) as finished:
            runpy.run_path(str(METAWORLD / name), run_name="__main__")
        assert finished.value.code == 0

    return run_script
