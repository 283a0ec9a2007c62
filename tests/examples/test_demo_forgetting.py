"""The example runs as its README says."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/demo_forgetting/run.py"


def test_quick_prints_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--quick", "--out", str(out)])
    with pytest.raises(SystemExit) as finished:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert finished.value.code == 0
    rows = json.loads(out.read_text())
    assert [row["arm"] for row in rows] == ["teacher", "`--mode none`", "`--mode hidden`"]
    assert rows[0]["old"] >= 0.8
    assert rows[2]["l_ret"] > 0
    assert "| `--mode hidden` | 0 |" in capsys.readouterr().out
