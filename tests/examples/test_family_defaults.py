"""The example runs as its README says."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/family_defaults/run.py"


@pytest.mark.slow
def test_quick_measures_what_holds_behaviour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    out = tmp_path / "results.json"
    options = ["--quick", "--families", "act,multi_task_dit", "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options, "--out", str(out)])
    with pytest.raises(SystemExit) as finished:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert finished.value.code == 0
    printed = capsys.readouterr().out
    results = json.loads(out.read_text())
    assert list(results) == ["act", "multi_task_dit"]
    for name, default in (
        ("act", "decoder -1 action_tokens"),
        ("multi_task_dit", "transformer -1 action_tokens"),
    ):
        rows = {row["arm"]: row for row in results[name]}
        assert f"### {name}" in printed
        assert f"| **{default}** (default) |" in printed
        assert list(rows) == ["untrained", "teacher", "none", default, "hidden+action"]
        for row in list(rows.values())[2:]:
            assert row["moved"] > 0
            assert row["new_error"] > 0
            assert row["new_loss"] > 0
