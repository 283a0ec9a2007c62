"""What the tests of examples share."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

METAWORLD = Path(__file__).parents[2] / "examples/metaworld_forgetting"


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
