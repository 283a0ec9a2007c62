"""`craft train` as a user meets it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from craftcli.cli.app import app
from craftcli.config.settings import option_name
from craftcli.config.train import TrainConfig
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.engine.method.multiplier import Multiplier
from craftcli.engine.metrics import LogEntry

SHORT = ("--steps", "2", "--batch-size", "4", "--log-every", "1")
HELD = ("--retention-every", "1", "--lambda-init", "2", "--epsilon-start", "0.5")
NUMBER = r"[-+]?\d[\d.]*(?:e[-+]\d+)?"
LINE = (
    rf"Step (\d)/2 \| loss={NUMBER} \| grdn={NUMBER} \| lr={NUMBER} \| updt_s={NUMBER} "
    rf"\| data_s={NUMBER} \| anchor_s={NUMBER} \| mode=hidden\+action \| L_ret={NUMBER} "
    rf"\| L_hidden={NUMBER} "
    rf"\| L_action={NUMBER} \| λ={NUMBER} \| ε={NUMBER} "
    rf"\| dot={NUMBER} \| cos={NUMBER}(?: \| conflict=\d+%)?(?: \| projected=\d+%)?"
)
DOWNSTREAM = {"lm_head.weight", "norm.weight"}


def train(*arguments: Any) -> Any:
    command = ["train", *SHORT, *map(str, arguments)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The result of two steps under retention and their run; tests must not change it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    result = train("--cache", cache, *HELD, "-o", run)
    return result, run


def settings_in(table: str) -> dict[str, list[str]]:
    """The values and origins in a table of settings, without what long values fold over."""
    rows = re.findall(r"^ ([a-z][\w-]*) +(.*)$", table, re.MULTILINE)
    return {name: rest.split() for name, rest in rows}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def saved_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints/last/pretrained_model/model.safetensors")


def unchanged(run: Path) -> set[str]:
    """The last two parts of the names of tensors that are the teacher's to the bit."""
    teacher, student = load_file(TEACHER_FOLDER / "model.safetensors"), saved_weights(run)
    assert teacher.keys() == student.keys()
    same = [name for name in teacher if torch.equal(teacher[name], student[name])]
    return {".".join(name.split(".")[-2:]) for name in same}


def test_a_first_session(craft: Callable[..., Any], tmp_path: Path) -> None:
    """The commands of the README in an empty folder, in order, with what they leave there."""
    built = craft("cache", "build", "--layers", "-2,-1", "--samples", 32)
    assert built.exit_code == 0, built.output
    inspected = craft("cache", "inspect")
    assert inspected.exit_code == 0
    for chosen in (("--mode", "hidden"), ()):
        trained = craft("train", *chosen, *SHORT)
        assert trained.exit_code == 0, trained.output
        assert "anchor cache loaded: 32 rows" in trained.stdout
    assert {entry.name for entry in tmp_path.iterdir()} == {"anchors.zarr", "runs"}
    runs = {run.name[16:]: run for run in (tmp_path / "runs").iterdir()}
    assert runs.keys() == {"hidden", "hidden+action"}
    for run in runs.values():
        assert re.fullmatch(r"\d{8}-\d{6}-[a-z+]+", run.name)
        names = {entry.name for entry in run.iterdir()}
        written = {"checkpoints", "craft_config.json", "metrics.jsonl", "summary.json"}
        assert names == {*written, "craft.lock"}


def test_the_configuration_is_shown_with_the_source_of_each_value(
    cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("lambda-lr = 0.5\nlog_every = 2\n")
    out = train("--cache", cache, "--config", file, "-o", tmp_path / "run").stdout
    table = out.partition("Configuration\n")[2].partition("Retention mode")[0]
    shown = settings_in(table)
    assert shown["lambda-lr"] == ["0.5", "(file)"]
    assert shown["log-every"] == ["1", "(flag)"]
    assert shown["steps"] == ["2", "(flag)"]
    assert shown["epsilon-start"] == ["0.02", "(default)"]
    assert shown.keys().isdisjoint({"merge", "policy", "loss"})
    left = len(TrainConfig.names()) - len(shown)
    assert f" {left} more settings at their defaults; --verbose shows all\n" in table


def test_verbose_shows_all_settings(craft: Callable[..., Any], cache: Path) -> None:
    # Stops before the first step, after the table.
    out = craft("train", "--cache", cache, "-o", __file__ + "/run", "--verbose").stdout
    table = out.partition("Configuration\n")[2].partition("Retention mode")[0]
    shown = settings_in(table)
    assert shown.keys() == {option_name(name)[2:] for name in TrainConfig.names()}
    assert shown["merge"] == ["weighted", "(default)"]
    assert shown["policy"] == ["demo", "(default)"]
    assert "--verbose" not in table


def test_settings_without_effect_come_in_one_warning(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("lambda-kp = 2.0\n")
    given = ("--config", file, "--mode", "action", "--loss", "mse", "--fisher-samples", 8)
    result = train("--cache", cache, *given, "-o", tmp_path / "run", "--json")
    warnings = result.stderr.split("Warning: ")[1:]
    assert len(warnings) == 1
    assert " ".join(warnings[0].split()).startswith(
        "these settings have no effect here: --lambda-kp (without --controller nupi); "
        "--fisher-samples (without --mode ewc); --loss (without --mode hidden)."
    )
    assert json.loads(result.stdout)["settings"]["lambda_kp"] == 2.0


def test_notes_are_printed_by_their_severity(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "craftcli.engine.method"
    monkeypatch.setattr(f"{method}.budget.Budget.observe", lambda *_: "ε was found.")
    monkeypatch.setattr(f"{method}.constraint.LambdaWatch.observe", lambda *_, **__: "ε is small.")
    result = train("--cache", cache, "-o", tmp_path / "run")
    assert "\nε was found.\n" in result.stdout
    assert "Warning: ε is small.\n" in result.stderr
    assert "ε was found." not in result.stderr


def test_the_demos_own_values_are_shown_as_such(craft: Callable[..., Any], cache: Path) -> None:
    # Stops before the first step, after the table.
    out = craft("train", "--cache", cache, "-o", __file__ + "/run").stdout
    assert re.search(r"^ steps +400 +\(demo\)", out, re.MULTILINE)
    assert re.search(r"^ batch-size +32 +\(demo\)", out, re.MULTILINE)


def test_retention_is_announced_before_the_first_step(trained: tuple[Any, Path]) -> None:
    lines = trained[0].stdout.splitlines()
    order = [
        lines.index("Configuration"),
        lines.index("Retention mode: hidden+action"),
        lines.index("anchor cache loaded: 32 rows"),
        next(i for i, line in enumerate(lines) if line.startswith("L_ret at the teacher's")),
        next(i for i, line in enumerate(lines) if line.startswith("Step 1/2")),
    ]
    assert order == sorted(order)
    drift = re.search(r"L_ret at the teacher's weights: (\S+) \(0 to", trained[0].stdout)
    assert drift
    assert float(drift[1]) <= 1e-6


def test_log_lines_carry_the_figures_of_the_method(trained: tuple[Any, Path]) -> None:
    lines = [line for line in trained[0].stdout.splitlines() if line.startswith("Step")]
    matches = [re.fullmatch(LINE, line) for line in lines]
    assert [match and match[1] for match in matches] == ["1", "2"]
    assert "L_ret=0 | L_hidden=0 | L_action=0 | λ=2.000 | ε=0.5 " in lines[0]


def test_metrics_file_has_a_row_for_every_log_line(trained: tuple[Any, Path]) -> None:
    result, run = trained
    rows = metrics_of(run)
    shown = [line for line in result.stdout.splitlines() if line.startswith("Step")]
    assert [LogEntry(**row).line() for row in rows] == shown
    assert rows[1]["l_ret"] > 0


@pytest.mark.parametrize(("every", "log"), [(5, 2), (2, 3), (3, 50)])
def test_log_lines_carry_retention_whatever_the_two_cadences(
    cache: Path, tmp_path: Path, every: int, log: int
) -> None:
    """Pitfall 9: the interval of the log may never meet the cadence of retention."""
    more = ("--steps", 6, "--retention-every", every, "--log-every", log)
    train("--cache", cache, "-o", tmp_path / "run", *more)
    rows = metrics_of(tmp_path / "run")
    for row, previous in zip(rows, [{"step": 0}, *rows], strict=False):
        had_a_turn = any(step % every == 0 for step in range(previous["step"], row["step"]))
        assert (row["l_ret"] is not None) == had_a_turn
    assert any(row["l_ret"] is not None for row in rows)


def test_a_projection_is_marked_in_the_log(cache: Path, tmp_path: Path) -> None:
    # With this threshold every cosine is a conflict, once the student has left its teacher.
    more = ("--retention-every", 1, "--conflict-threshold", 1, "--project-when", "conflict")
    lines = train("--cache", cache, "-o", tmp_path / "run", *more).stdout.splitlines()
    second = next(line for line in lines if line.startswith("Step 2/2"))
    assert second.endswith(" | conflict=100% | projected=100%")


def test_freezing_goes_with_projection_per_layer(cache: Path, tmp_path: Path) -> None:
    more = ("--surgery", "per_layer", "--mode", "hidden", "--freeze-downstream")
    result = train("--cache", cache, "-o", tmp_path / "run", *more)
    assert result.exit_code == 0, result.output


def test_lerobot_reopens_the_checkpoint_with_the_same_weights(
    trained: tuple[Any, Path], new_data: Any
) -> None:
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.factory import make_policy

    from craftcli.policies.lerobot.checkpoint import load_checkpoint

    folder = trained[1] / "checkpoints/last/pretrained_model"
    config = PreTrainedConfig.from_pretrained(folder)
    config.pretrained_path, config.device = folder, "cpu"
    theirs = make_policy(config, ds_meta=new_data.meta).state_dict()
    ours = load_checkpoint(str(trained[1]), device="cpu").policy.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_settings_and_state_are_beside_the_checkpoint(trained: tuple[Any, Path]) -> None:
    last = trained[1] / "checkpoints/last"
    assert last.readlink() == Path("000002")
    config = json.loads((last / "craft_config.json").read_text())
    assert (config["mode"], config["steps"], config["lambda_init"]) == ("hidden+action", 2, 2.0)
    state = json.loads((last / "craft_state.json").read_text())
    rows = metrics_of(trained[1])
    multiplier = Multiplier(value=2.0, lr=config["lambda_lr"])
    for row in rows:
        multiplier.step(row["l_ret"], row["epsilon"])
    assert state["step"] == 2
    assert multiplier.value != 2.0
    assert state["retention"]["joint"]["multiplier"] == {
        "value": pytest.approx(multiplier.value),
        "rule": "balanced",
    }


def test_every_checkpoint_asked_for_is_kept(cache: Path, tmp_path: Path) -> None:
    train("--cache", cache, "--save-every", 1, "-o", tmp_path / "run")
    kept = sorted(entry.name for entry in (tmp_path / "run/checkpoints").iterdir())
    assert kept == ["000001", "000002", "last"]


def test_what_is_free_to_drift_is_named(cache: Path, tmp_path: Path) -> None:
    free = ("--mode", "hidden", "--no-freeze-downstream")
    result = train("--cache", cache, *free, *HELD, "-o", tmp_path / "run")
    (warning,) = (line for line in result.stderr.splitlines() if line.startswith("Warning:"))
    assert all(name in warning for name in DOWNSTREAM)
    assert "layer (8 %): " in warning
    assert "--freeze-downstream" in warning
    assert unchanged(tmp_path / "run") == set()


def test_mode_hidden_freezes_a_small_part_behind_it_and_says_so(
    cache: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    result = train("--cache", cache, "--mode", "hidden", *HELD, "--save-every", 1, "-o", run)
    assert "Warning" not in result.stderr
    assert "lm_head.weight, norm.weight; --no-freeze-downstream trains them" in result.stdout
    assert "Retention reaches 76 of 76 trained tensors, 100 % of" in result.stdout
    assert unchanged(run) == DOWNSTREAM
    saved = run / "checkpoints/000001"
    assert json.loads((saved / "craft_config.json").read_text())["freeze_downstream"] is None
    assert json.loads((saved / "craft_state.json").read_text())["froze_downstream"] is True
    resumed = CliRunner().invoke(app, ["train", "--resume", str(run), "--from", "1"])
    assert resumed.exit_code == 0, resumed.output
    assert unchanged(run) == DOWNSTREAM


def test_the_default_leaves_nothing_free_to_drift(trained: tuple[Any, Path]) -> None:
    result, run = trained
    assert "Warning" not in result.stderr
    assert (
        "Retention reaches 78 of 78 trained tensors, 100 % of the trained weights" in result.stdout
    )
    assert "Nothing trainable is free to drift behind what is retained" in result.stdout
    assert unchanged(run) == set()


@pytest.mark.parametrize("mode", ["hidden", "hidden+action"])
def test_freeze_downstream_holds_exactly_what_was_named(
    cache: Path, tmp_path: Path, mode: str
) -> None:
    held = ("--mode", mode, "--freeze-downstream")
    result = train("--cache", cache, *held, "-o", tmp_path / "run")
    assert "Warning" not in result.stderr
    frozen = "Frozen behind the deepest retained layer (8 %): lm_head.weight, norm.weight\n"
    assert frozen in result.stdout
    assert unchanged(tmp_path / "run") == DOWNSTREAM


def test_mode_none_needs_no_cache_and_retains_nothing(
    craft: Callable[..., Any], tmp_path: Path
) -> None:
    result = craft("train", "--mode", "none", *SHORT, "-o", "plain")
    assert result.exit_code == 0, result.output
    assert "Retention mode: none" in result.stdout
    assert len(re.findall(r"^Step \d/2 .* \| mode=none$", result.stdout, re.MULTILINE)) == 2
    assert "L_ret" not in result.output
    state = json.loads((tmp_path / "plain/checkpoints/last/craft_state.json").read_text())
    assert state["retention"] is None


def test_retention_changes_what_is_learned(cache: Path, tmp_path: Path) -> None:
    for mode in ("none", "hidden"):
        train("--cache", cache, "--mode", mode, "--retention-every", 1, "-o", tmp_path / mode)
    plain, held = saved_weights(tmp_path / "none"), saved_weights(tmp_path / "hidden")
    assert any(not torch.equal(plain[name], held[name]) for name in plain)


def test_the_same_seed_gives_the_same_weights(trained: tuple[Any, Path], tmp_path: Path) -> None:
    config = json.loads((trained[1] / "checkpoints/last/craft_config.json").read_text())
    again = tmp_path / "again"
    same = ("--cache", config["cache"], *HELD)
    train(*same, "-o", again)
    first, second = saved_weights(trained[1]), saved_weights(again)
    assert all(torch.equal(first[name], second[name]) for name in first)
    train(*same, "--seed", 1, "-o", tmp_path / "other")
    other = saved_weights(tmp_path / "other")
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_run_can_be_the_policy_of_the_next(
    trained: tuple[Any, Path], new_data: Any, tmp_path: Path
) -> None:
    run = trained[1]
    next_run = ("--policy", run, "--dataset", new_data.root, "-o", tmp_path / "next")
    result = train(*next_run, "--mode", "none")
    assert "demo" not in result.stderr
    assert (tmp_path / "next/checkpoints/last/pretrained_model/model.safetensors").is_file()


def test_json_is_one_document_and_nothing_else(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = train("--cache", cache, "-o", run, "--json")
    document = json.loads(result.stdout)
    assert document["run"] == str(run)
    assert (Path(document["checkpoint"]) / "craft_state.json").is_file()
    assert document["settings"]["steps"] == 2
    assert "Step 1/2" in result.stderr
    verdict = document["verdict"]
    assert (verdict["outcome"], verdict["turns"], verdict["step"]) == ("unknown", 2, 2)
    assert json.loads((run / "summary.json").read_text())["verdict"] == verdict
    assert verdict["finding"] in result.stderr


def test_overwrite_replaces_a_run(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train("--mode", "none", "-o", run)
    train("--cache", cache, "-o", run, "--overwrite")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    config = json.loads((run / "checkpoints/last/craft_config.json").read_text())
    assert config["mode"] == "hidden+action"


@pytest.mark.parametrize(
    ("kind", "merge"),
    [("nmse", "weighted"), ("mse", "equal"), ("l1", "task_priority"), ("cosine", "weighted")],
)
def test_every_loss_and_merge_trains(cache: Path, tmp_path: Path, kind: str, merge: str) -> None:
    more = ("--loss", kind, "--merge", merge, "--epsilon-start", 0.1)
    train("--cache", cache, "-o", tmp_path / "run", *more)
    rows = metrics_of(tmp_path / "run")
    assert rows[0]["l_ret"] == pytest.approx(0, abs=1e-6)
    assert rows[1]["l_ret"] > 0


def test_anchors_of_the_new_data_give_a_warning(
    build: Callable[..., Path], teacher: Any, new_data: Any, tmp_path: Path
) -> None:
    from craftcli.cache.build.build import build_cache
    from craftcli.config.cache import CacheConfig

    config = CacheConfig(output=tmp_path / "wrong.zarr", samples=16)
    build_cache(config, teacher, new_data, on_plan=lambda _: None, on_rows=lambda _: None)
    warning = train("--cache", config.output, "-o", tmp_path / "run").stderr
    assert "the anchors come from the dataset that is trained on" in warning


@pytest.mark.slow
def test_under_torchrun_one_process_prints(cache: Path, tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
    small = ("--batch-size", "4", "--anchor-batch-size", "4", "--device", "cpu", "--steps", "2")
    command = (*torchrun, "-m", "craftcli", "train", *small, "--cache", str(cache), "--json")
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["last"]["step"] == 2
    (run,) = (tmp_path / "runs").iterdir()  # one folder, though each process has its own clock
    assert json.loads((run / "checkpoints/last/craft_state.json").read_text())["world"] == 2
    assert len(metrics_of(run)) == 1


def test_epsilon_is_a_name_of_the_budget(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = train("--cache", cache, "--epsilon", "0.05", "--steps", "1", "-o", run)
    assert settings_in(result.stdout)["epsilon-start"] == ["0.05", "(flag)"]
    assert json.loads((run / "craft_config.json").read_text())["epsilon_start"] == 0.05
    assert [line["epsilon"] for line in metrics_of(run)] == [0.05]


def test_a_run_over_its_budget_says_so_from_its_end_on(
    craft: Callable[..., Any], cache: Path
) -> None:
    """λ may not rise, and the learning rate is high: nothing can hold the policy."""
    weak = ("--lambda-init", "0.01", "--lambda-max", "0.01", "--lr", "0.01")
    sizes = ("--steps", "12", "--batch-size", "2", "--anchor-batch-size", "4", "--device", "cpu")
    result = craft("train", "--cache", cache, *weak, *sizes, "-o", "run")
    assert result.exit_code == 0, result.output
    verdict = json.loads(Path("run/summary.json").read_text())["verdict"]
    assert (verdict["outcome"], verdict["turns"]) == ("exceeded", 12)
    assert verdict["budget_used"] > 1.5
    assert verdict["above_share"] > 0.5
    text = f"{verdict['finding']} {verdict['advice']}"
    assert text.startswith("L_ret ended at ")
    assert "x ε and was above it in 92 % of the steps: the old skill is probably not kept." in text
    assert "λ is at its maximum of 0.01: raise --lambda-max or lower --lr." in text
    *_, last, following = result.stderr.splitlines()
    assert (last, following) == (f"Warning: {text}", "Next: craft eval run")
    evaluated = craft("eval", "run", "--env", "demo:red", "--episodes", "1", "--max-steps", "1")
    assert evaluated.exit_code == 0, evaluated.output
    assert f"Warning: {text}" in evaluated.stderr
    assert verdict["finding"] in " ".join(craft("inspect", "run").stdout.split())
