"""The Meta-World example runs as its README says."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
def test_quick_goes_from_data_to_report(
    run_metaworld: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = tmp_path / "tables.md"
    tables.write_text("Before.\n\n<!-- pick-act -->\nold\n<!-- end of pick-act -->\n\nAfter.\n")
    names = ["plain fine-tuning", "hidden + action", "replay", "EWC", "weight merge"]
    options = ("--arms", ";".join([*names, "half of the scenes: action"]))
    run_metaworld("run.py", *options)
    text = tables.read_text()
    assert text.startswith("Before.\n\n<!-- pick-act -->\n### pick-place-v3 → door-open-v3")
    assert "<!-- end of pick-act -->\n\nAfter.\n" in text
    assert "| hidden + action | 1 |" in text
    half = next(line for line in text.splitlines() if line.startswith("| half of the scenes: act"))
    assert half.count("[") == 3  # with and without anchors, and new
    everything = json.loads((tmp_path / "results.json").read_text())
    assert everything.keys() == {"pick-act", "pick-act-coverage"}
    results = everything["pick-act"]
    arms = {arm["arm"]: arm for arm in results["arms"]}
    assert arms["hidden + action"]["action_error"]["mean"] > 0
    assert any(name.startswith("weight merge, α") for name in arms)
    assert results["teacher"]["old"]["mean"] == 0
    assert (tmp_path / "pick-act.png").stat().st_size > 10_000
    assert (tmp_path / "work/reports/pick-act/index.html").is_file()

    capsys.readouterr()
    run_metaworld("run.py", *options)
    assert "/" not in capsys.readouterr().err  # no job is done again
    assert tables.read_text() == text
