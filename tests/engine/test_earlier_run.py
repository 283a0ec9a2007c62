"""A real run of an earlier version of craft, killed there and resumed here."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FIXTURE = Path(__file__).parent / "fixtures/earlier_run"


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the fixture as the working directory: its paths are relative to it."""
    folder = Path(shutil.copytree(FIXTURE, tmp_path / "earlier", symlinks=True))
    monkeypatch.chdir(folder)
    return folder


def log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_from_before_the_rebuild_resumes_and_ends_as_it_would_have(
    craft: Callable[..., Any], earlier: Path
) -> None:
    result = craft("train", "--resume", "run", "--json")
    assert result.exit_code == 0, result.output
    assert "λ moves as in the version of craft that began this run: by η (L_ret - ε)" in (
        result.stderr
    )
    assert "checkpoint 000003 has no digests" in result.stderr
    ended, whole = log(earlier / "run"), log(earlier / "whole")
    assert [entry["step"] for entry in ended] == [1, 2, 3, 4, 5, 6]
    for now, then in zip(ended, whole, strict=True):
        for name in ("loss", "l_ret", "lam", "epsilon", "cos", "grad_norm", "projection_rate"):
            # Other machines round in other ways; L_ret is 0 to rounding at the first step.
            assert now[name] == pytest.approx(then[name], rel=1e-2, abs=1e-6), (now["step"], name)
    verdict = json.loads(result.stdout)["verdict"]
    assert (verdict["since"], verdict["turns"]) == (3, 3)


def test_its_new_checkpoints_keep_the_earlier_rule_and_have_digests(
    craft: Callable[..., Any], earlier: Path
) -> None:
    assert craft("train", "--resume", "run").exit_code == 0
    last = earlier / "run/checkpoints/last"
    assert last.readlink() == Path("000006")
    assert (last / "craft_manifest.json").is_file()
    assert not (earlier / "run/checkpoints/000003/craft_manifest.json").exists()
    state = json.loads((last / "craft_state.json").read_text())
    assert state["retention"]["joint"]["multiplier"]["rule"] == "absolute"


def test_it_resumes_where_it_was_moved(
    craft: Callable[..., Any], earlier: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cache's own dataset was recorded relative to the working directory, so it is named."""
    monkeypatch.chdir(tmp_path)
    result = craft("train", "--resume", earlier / "run", "--anchor-root", earlier / "old")
    assert result.exit_code == 0, result.output
