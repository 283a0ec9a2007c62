"""`craft compare` as a user meets it."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from craftcli.cli.app import app
from craftcli.engine.summary_file import RunSummary
from craftcli.evaluation.results import Episode, Evaluation, PolicyIdentity, Success

SHORT = ("--steps", "2", "--batch-size", "4", "--device", "cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two seeds of plain fine-tuning, with evaluations; tests must not change them."""
    folder = tmp_path_factory.mktemp("runs")
    found = []
    for seed in range(2):
        run = folder / f"none-{seed}"
        command = ["train", "--mode", "none", "--seed", seed, "-o", run, *SHORT]
        result = CliRunner().invoke(app, list(map(str, command)), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        evaluation_of("student", step=2, old=0).save(run / "evaluations/evaluation.json")
        found.append(run)
    return found


def evaluation_of(digest: str, *, step: int | None, old: int) -> Evaluation:
    def success(environment: str, group: str, count: int) -> Success:
        episodes = [Episode(seed=1000 + i, success=i < count, steps=1) for i in range(10)]
        return Success(environment=environment, group=group, max_steps=8, episodes=tuple(episodes))

    identity = PolicyIdentity(source="x", policy_type="x", weights_digest=digest, step=step)
    both = (success("demo:red", "old", old), success("demo:blue", "new", 10 - old))
    return Evaluation(policy=identity, success=both)


def test_a_run_says_what_it_cost(runs: list[Path]) -> None:
    summary = RunSummary.read(runs[0])
    assert summary is not None
    assert summary.complete
    assert (summary.steps_done, summary.anchors, summary.anchor_targets) == (2, None, None)
    assert summary.seconds > 0
    assert summary.peak_memory_bytes > 100 * 2**20
    assert 400_000 < summary.trainable_parameters == summary.parameters < 500_000


def test_runs_beside_their_teacher(
    craft: Callable[..., Any], runs: list[Path], tmp_path: Path
) -> None:
    summary = RunSummary.read(runs[0])
    assert summary is not None
    evaluation_of(summary.teacher, step=None, old=10).save(tmp_path / "teacher.json")
    result = craft("compare", *runs, "teacher.json", "--json", "--title", "Mine")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (arm,) = document["arms"]
    assert (arm["arm"], arm["seeds"]) == ("none", [0, 1])
    assert (arm["old"]["mean"], arm["new"]["mean"], arm["nbt"]["mean"]) == (0.0, 1.0, 1.0)
    assert document["teacher"]["old"]["mean"] == 1.0
    assert document["notes"] == []
    assert "<h1>Mine</h1>" in (tmp_path / "compare/index.html").read_text("utf-8")


def test_the_table_is_whole_where_there_is_no_terminal(
    craft: Callable[..., Any], runs: list[Path]
) -> None:
    result = craft("compare", runs[0])
    assert result.exit_code == 0, result.output
    header, row, *_ = result.stdout.splitlines()
    assert header.split() == [
        "arm",
        "seeds",
        "old",
        "success",
        "new",
        "success",
        "time",
        "memory",
        "trained",
    ]
    assert "0.00 [0.00, 0.28]  1.00 [0.72, 1.00]" in row
    assert "…" not in result.stdout
    assert "NBT needs the teacher's own success" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "There is nothing to compare"),
        (["nowhere"], 2, "there is no such folder or file"),
        (["."], 2, "it has no craft_config.json"),
        (["x", "--sweep", "y.toml"], 2, "cannot be compared at once"),
        (["--sweep", "nowhere.toml"], 2, "Cannot read the sweep nowhere.toml"),
    ],
)
def test_bad_input(
    craft: Callable[..., Any], arguments: list[str], code: int, message: str
) -> None:
    result = craft("compare", *arguments)
    assert result.exit_code == code
    assert message in result.stderr


def test_a_damaged_evaluation_is_named(craft: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    result = craft("compare", "broken.json")
    assert result.exit_code == 3
    assert "broken.json is not an evaluation that craft can read" in result.stderr


def test_a_run_counts_once(craft: Callable[..., Any], runs: list[Path], tmp_path: Path) -> None:
    """Otherwise the same number twice would narrow the interval over seeds."""
    copied = shutil.copytree(runs[0], tmp_path / "copy")
    (tmp_path / "link").symlink_to(runs[0])
    for again in (runs[0], copied, tmp_path / "link"):
        result = craft("compare", runs[0], again, "--json")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        (arm,) = document["arms"]
        assert (arm["seeds"], arm["runs"]) == ([0], [str(runs[0])])
        assert any("counts once" in note for note in document["notes"])


def test_a_copy_that_was_evaluated_gives_its_results(
    craft: Callable[..., Any], runs: list[Path], tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(runs[0], tmp_path / "bare"))
    shutil.rmtree(bare / "evaluations")
    document = json.loads(craft("compare", bare, runs[0], "--json").stdout)
    assert document["arms"][0]["new"]["mean"] == 1.0


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("craft_config.json", "[]"),
        ("craft_config.json", "{"),
        ("craft_config.json", '{"seed": 0}'),
        ("summary.json", '{"steps": 1}'),
        ("summary.json", "\x00\xff"),
        ("evaluations/evaluation.json", "[" * 100_000),
    ],
)
def test_a_damaged_run_is_named_and_the_rest_is_compared(
    craft: Callable[..., Any], runs: list[Path], tmp_path: Path, file: str, content: str
) -> None:
    broken = Path(shutil.copytree(runs[1], tmp_path / "broken"))
    (broken / file).write_text(content)
    result = craft("compare", runs[0], broken, "--json")
    assert result.exit_code == 3, result.output
    assert str(broken / file) in result.stderr
    document = json.loads(result.stdout)
    assert document["arms"][0]["runs"] == [str(runs[0])]
    assert str(broken / file) in document["damage"][0]
    assert (tmp_path / "compare/index.html").is_file()


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("craft_config.json", '"seed": 1', '"seed": 3'),
        ("summary.json", '"steps_done": 2', '"steps_done": 3'),
        ("evaluations/evaluation.json", '"success": false', '"success": true'),
    ],
)
def test_a_changed_value_is_noticed(
    craft: Callable[..., Any], runs: list[Path], tmp_path: Path, file: str, before: str, after: str
) -> None:
    changed = Path(shutil.copytree(runs[1], tmp_path / "changed", symlinks=True))
    text = (changed / file).read_text()
    assert before in text
    (changed / file).write_text(text.replace(before, after, 1))
    result = craft("compare", runs[0], changed, "--json")
    assert result.exit_code == 3, result.output
    assert "has changed" in result.stderr
    assert json.loads(result.stdout)["arms"][0]["runs"] == [str(runs[0])]


def test_a_changed_log_costs_the_curves_alone(
    craft: Callable[..., Any], runs: list[Path], tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(runs[1], tmp_path / "changed", symlinks=True))
    text = (changed / "metrics.jsonl").read_text()
    other = re.sub(r'"loss": \d', '"loss": 9', text)
    assert other != text
    for content in (other, bytes(len(text)).decode(), None):
        (changed / "metrics.jsonl").unlink()
        if content is not None:
            (changed / "metrics.jsonl").write_text(content)
        result = craft("compare", runs[0], changed, "--json")
        assert result.exit_code == 3, result.output
        assert "metrics.jsonl" in result.stderr
        assert json.loads(result.stdout)["arms"][0]["seeds"] == [0, 1]
        (changed / "metrics.jsonl").touch()


@pytest.mark.parametrize("line", ["garbage", "[1]", '{"step": "x"}', '{"step": 1, "loss": NaN}'])
def test_damaged_metrics_cost_the_curves_alone(
    craft: Callable[..., Any], runs: list[Path], tmp_path: Path, line: str
) -> None:
    broken = Path(shutil.copytree(runs[1], tmp_path / "broken"))
    with (broken / "metrics.jsonl").open("a") as metrics:
        metrics.write(line + "\n")
    result = craft("compare", runs[0], broken, "--json")
    assert result.exit_code == 3, result.output
    assert "metrics.jsonl" in result.stderr
    assert json.loads(result.stdout)["arms"][0]["seeds"] == [0, 1]


def test_a_sweep_from_its_file(craft: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(
        """
        title = "A short one"
        [train]
        steps = 2
        batch_size = 4
        device = "cpu"
        [eval]
        episodes = 2
        env = ["demo:red", "demo:blue"]
        [[arm]]
        name = "none"
        train.mode = "none"
        """
    )
    first = craft("compare", "--sweep", "sweep.toml", "--json")
    assert first.exit_code == 0, first.output
    assert "1/3 evaluate teacher" in first.stderr
    assert "3 jobs done, 0 kept" in first.stderr
    again = craft("compare", "--sweep", "sweep.toml", "--json")
    assert "0 jobs done, 3 kept" in again.stderr
    assert json.loads(first.stdout) == json.loads(again.stdout)
    reported = craft("compare", "sweep", "--json")
    assert json.loads(reported.stdout) == json.loads(again.stdout)


def test_reporting_does_not_load_lerobot(runs: list[Path], tmp_path: Path) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from craftcli.cli.app import app\n"
        f"result = CliRunner().invoke(app, ['compare', {str(runs[0])!r}, '-o', 'report'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert not {'torch', 'lerobot', 'zarr'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
