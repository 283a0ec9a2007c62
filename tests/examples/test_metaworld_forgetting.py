"""The Meta-World example runs as its README says."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/metaworld_forgetting/run.py"


@pytest.mark.slow
def test_quick_goes_from_data_to_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    readme = tmp_path / "README.md"
    readme.write_text("Before.\n\n<!-- pick-act -->\nold\n<!-- end of pick-act -->\n\nAfter.\n")
    options = ["--quick", "--work", str(tmp_path / "work"), "--readme", str(readme)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])

    def run() -> None:
        with pytest.raises(SystemExit) as finished:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert finished.value.code == 0

    run()
    text = readme.read_text()
    assert text.startswith("Before.\n\n<!-- pick-act -->\n### pick-place-v3 → door-open-v3")
    assert text.endswith("<!-- end of pick-act -->\n\nAfter.\n")
    assert "| hidden + action | 1 |" in text
    results = json.loads((tmp_path / "results.json").read_text())["pick-act"]
    arms = {arm["arm"]: arm for arm in results["arms"]}
    assert arms["hidden + action"]["action_error"]["mean"] > 0
    assert any(name.startswith("weight merge, α") for name in arms)
    assert results["teacher"]["old"]["mean"] == 0
    assert (tmp_path / "pick-act.png").stat().st_size > 10_000
    assert (tmp_path / "work/reports/pick-act/index.html").is_file()

    capsys.readouterr()
    run()
    assert "/" not in capsys.readouterr().err  # no job is done again
    assert readme.read_text() == text
