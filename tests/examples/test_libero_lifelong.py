"""The LIBERO example runs on its stand-in, as its README says."""

import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples/libero_lifelong"


@pytest.mark.slow
def test_suites_are_split_learned_held_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    arms = ["hidden + action", "hidden + action, no old data"]
    options = ["--quick", "--work", str(tmp_path), "--arms", ";".join(arms)]

    def run() -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["run.py", *options])
        with pytest.raises(SystemExit) as finished:
            runpy.run_path(str(FOLDER / "run.py"), run_name="__main__")
        assert finished.value.code == 0
        said = capfd.readouterr()
        return said.out, said.err

    table, commands = run()
    assert [path.name for path in sorted((tmp_path / "data").iterdir())] == [
        "green",
        "red",
        "yellow",
    ]
    tasks = (tmp_path / "data/green/meta/tasks.parquet").read_bytes()
    assert b"green" in tasks
    matrices = json.loads((tmp_path / "results.json").read_text())
    assert [matrix["arm"] for matrix in matrices] == arms
    assert [len(row) for row in matrices[0]["rows"]] == [1, 2, 3]
    assert "| hidden + action, no old data | 1 |" in table
    # The first suite is learned once for all arms, the two others by each.
    assert commands.count("$ craft train") == 1 + 2 * len(arms)
    last = next(line for line in reversed(commands.splitlines()) if "--old-tasks" in line)
    instructions = Path(last.split("--old-tasks ")[1].split()[0]).read_text()
    assert instructions == "reach the red block\nreach the green block\n"
    assert "$ craft" not in run()[1]  # nothing is done again
