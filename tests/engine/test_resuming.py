"""`--resume` checks what it depends on, starts from any checkpoint, and finishes what is done."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from craftcli.config.train import TrainConfig
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.distributed import Processes
from craftcli.engine.checkpoint_manifest import CheckpointManifest, digest_files
from craftcli.engine.resuming import Resumed, forget_later
from craftcli.engine.run import open_run
from craftcli.engine.run_lock import run_locked
from craftcli.engine.summary_file import RunSummary
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE, CraftError

SIZES = ("--steps", 6, "--save-every", 2, "--batch-size", 2, "--anchor-batch-size", 2)
SHORT = (*SIZES, "--log-every", 1, "--device", "cpu")
WEIGHTS = "pretrained_model/model.safetensors"


def run_command(*arguments: Any) -> None:
    from typer.testing import CliRunner

    from craftcli.cli.app import app

    result = CliRunner().invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with three checkpoints."""
    run = tmp_path_factory.mktemp("finished") / "run"
    run_command(*SHORT, "--cache", cache, "-o", run)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


@pytest.fixture
def half(run: Path) -> Path:
    """The same run as it was after its fourth step."""
    return cut(run)


def cut(run: Path) -> Path:
    shutil.rmtree(run / "checkpoints/000006")
    (run / "checkpoints/last").unlink()
    (run / "checkpoints/last").symlink_to("000004")
    return run


def logged_steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def flip(file: Path, where: int = -3) -> None:
    content = bytearray(file.read_bytes())
    content[where] ^= 1
    file.write_bytes(content)


def test_a_finished_run_says_so(craft: Callable[..., Any], run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    result = craft("train", "--resume", run, "--json")
    assert result.exit_code == 0, result.output
    assert "The run is finished: all 6 steps are done" in result.stderr
    assert json.loads(result.stdout)["last"]["step"] == 6
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_killed_after_its_last_checkpoint_is_finished(run: Path) -> None:
    """As a sweep resumes it, which trains again and again while the summary lacks the last step."""
    summary = RunSummary.read(run)
    assert summary
    replace(summary, steps_done=4).write(run)
    trainer = open_run(TrainConfig(resume=run), {}, Processes()).trainer()
    result = trainer.run(*[lambda _: None] * 3)
    assert (result.was_finished, result.interrupted, result.last.step) == (True, False, 6)
    found = RunSummary.read(run)
    assert found
    assert found.complete


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("checkpoints/000004/training_state/optimizer_state.safetensors", "optimizer_state"),
        ("checkpoints/000004/training_state/rng_state.safetensors", "rng_state"),
        ("checkpoints/000004/pretrained_model/model.safetensors", "model.safetensors"),
        ("checkpoints/000004/pretrained_model/policy_preprocessor.json", "policy_preprocessor"),
        ("checkpoints/000004/craft_manifest.json", "craft_manifest.json"),
        ("metrics.jsonl", "metrics.jsonl has changed"),
    ],
)
def test_a_flipped_bit_is_named(
    craft: Callable[..., Any], half: Path, file: str, named: str
) -> None:
    flip(half / file, 40 if file == "metrics.jsonl" else -3)
    result = craft("train", "--resume", half)
    assert result.exit_code == EXIT_CHECK_FAILED, result.output
    assert named in result.stderr
    assert "--from (2)" in result.stderr
    assert "--accept-changes" in result.stderr


def test_a_setting_that_was_edited_is_named(craft: Callable[..., Any], half: Path) -> None:
    file = half / "craft_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lambda_lr": 7.0}))
    result = craft("train", "--resume", half)
    assert result.exit_code == EXIT_CHECK_FAILED
    assert "craft_config.json has another --lambda-lr" in result.stderr


def test_a_missing_summary_is_named(craft: Callable[..., Any], half: Path) -> None:
    (half / "summary.json").unlink()
    for command in (("train", "--resume", half), ("inspect", half), ("compare", half)):
        result = craft(*command)
        assert result.exit_code == EXIT_CHECK_FAILED, result.output
        assert "summary.json is missing" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("eval",),
        ("merge", "--alpha", 1, "-o", "merged"),
        ("train", "--mode", "none", "--dataset", "any", "-o", "next", "--policy"),
        ("dryrun", "--mode", "none", "--dataset", "any", "--policy"),
        ("cache", "build", "--dataset", "any", "--policy"),
        ("info", "--policies", "--policy"),
    ],
)
@pytest.mark.parametrize("file", ["model.safetensors", "policy_preprocessor.json"])
def test_a_changed_policy_is_not_opened(
    craft: Callable[..., Any], half: Path, command: tuple[Any, ...], file: str
) -> None:
    flip(half / "checkpoints/last/pretrained_model" / file)
    for source in (half, half / "checkpoints/000004", half / "checkpoints/last/pretrained_model"):
        result = craft(*command, source)
        assert result.exit_code == EXIT_CHECK_FAILED, result.output
        assert f"pretrained_model/{file} has changed" in result.output
    assert [entry.name for entry in Path().iterdir()] == ["run"]


def test_changed_processors_of_the_teacher_are_not_used(
    craft: Callable[..., Any], half: Path
) -> None:
    """They lie beside the policy if old and new tasks are normalised in different ways."""
    checkpoint = half / "checkpoints/000004"
    beside = checkpoint / "teacher_processors"
    beside.mkdir()
    for file in (checkpoint / "pretrained_model").glob("policy_p*"):
        shutil.copy(file, beside)
    saved = CheckpointManifest.read(checkpoint)
    assert saved
    replace(saved, files=digest_files(checkpoint)).write(checkpoint)
    (statistics,) = beside.glob("policy_preprocessor*.safetensors")
    flip(statistics)
    result = craft("eval", half, "--device", "cpu")
    assert result.exit_code == EXIT_CHECK_FAILED, result.output
    assert f"teacher_processors/{statistics.name} has changed" in result.stderr


def test_a_changed_record_of_a_live_teacher_is_named(
    craft: Callable[..., Any], tmp_path: Path
) -> None:
    """Its variances are the scale of L_ret."""
    live = ("--teacher", "live", "--mode", "hidden", "-o", "run")
    assert craft("train", *SHORT, *live).exit_code == 0
    cut(tmp_path / "run")
    file = tmp_path / "run/live_teacher.json"
    record = json.loads(file.read_text())
    record["variances"] = {name: value * 2 for name, value in record["variances"].items()}
    file.write_text(json.dumps(record))
    result = craft("train", "--resume", "run")
    assert result.exit_code == EXIT_CHECK_FAILED, result.output
    assert "live_teacher.json has changed" in result.stderr


def test_a_change_can_be_accepted(craft: Callable[..., Any], half: Path) -> None:
    flip(half / "checkpoints/000004/training_state/optimizer_state.safetensors")
    result = craft("train", "--resume", half, "--accept-changes")
    assert result.exit_code == 0, result.output
    assert "--accept-changes: training_state/optimizer_state.safetensors has changed" in (
        result.stderr
    )
    settings = json.loads((half / "checkpoints/last/craft_config.json").read_text())
    assert settings["accept_changes"] is False  # it was said of this time only


def test_a_checkpoint_of_an_earlier_version_resumes_with_a_note(
    craft: Callable[..., Any], half: Path, finished: Path
) -> None:
    (half / "checkpoints/000004/craft_manifest.json").unlink()
    state = half / "checkpoints/000004/craft_state.json"
    saved = json.loads(state.read_text())
    del saved["skipped"]
    state.write_text(json.dumps(saved))
    result = craft("train", "--resume", half)
    assert result.exit_code == 0, result.output
    assert "has no digests, because an earlier version of craft saved it" in result.stderr
    last = f"checkpoints/last/{WEIGHTS}"
    assert (half / last).read_bytes() == (finished / last).read_bytes()
    assert logged_steps(half) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("file", ["optimizer_state", "rng_state"])
def test_a_cut_state_of_an_earlier_version_is_explained(
    craft: Callable[..., Any], half: Path, file: str
) -> None:
    (half / "checkpoints/000004/craft_manifest.json").unlink()
    state = half / f"checkpoints/000004/training_state/{file}.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    result = craft("train", "--resume", half)
    assert result.exit_code == 1
    assert "000004 is incomplete or damaged" in result.stderr


def test_garbage_in_the_log_of_an_earlier_version_is_explained(
    craft: Callable[..., Any], half: Path
) -> None:
    (half / "checkpoints/000004/craft_manifest.json").unlink()
    log = half / "metrics.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([lines[0], "\x00garbage", *lines[1:], '{"step": 5, "lo']))
    result = craft("train", "--resume", half)
    assert result.exit_code == 1
    assert "line 2 of" in result.stderr
    assert craft("train", "--resume", half, "--accept-changes").exit_code == 0
    assert logged_steps(half) == [1, 2, 3, 4, 5, 6]


def resumed_at(run: Path, step: int, *, accepts_changes: bool = False) -> Resumed:
    """A run of an earlier version, whose checkpoint has no manifest."""
    return Resumed(
        run=run,
        config=TrainConfig(),
        checkpoint=run / "checkpoints/last",
        state={"step": step},
        last=None,
        accepts_changes=accepts_changes,
    )


def test_a_long_log_of_an_earlier_version_is_cut_in_bounded_memory(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 200_001)]
    log.write_text("\n".join(lines))  # the last one is not complete
    tracemalloc.start()
    forget_later(resumed_at(tmp_path, 150_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20 < log.stat().st_size / 4
    assert log.read_text().splitlines() == lines[:150_000]


def test_a_line_longer_than_any_entry_is_damage(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    good = '{"step": 1}\n'
    log.write_text(f"{good}{'1' * (2**21 + 5)}\n{good}")
    with pytest.raises(CraftError, match="its log is damaged"):
        forget_later(resumed_at(tmp_path, 1))
    assert [entry.name for entry in tmp_path.iterdir()] == [log.name]
    forget_later(resumed_at(tmp_path, 1, accepts_changes=True))
    assert log.read_text() == good * 2


def test_another_cache_in_its_place_is_refused(
    craft: Callable[..., Any], build: Callable[..., Path], tmp_path: Path
) -> None:
    build(tmp_path / "a.zarr", samples=16)
    assert craft("train", *SHORT, "--cache", "a.zarr", "-o", "run").exit_code == 0
    cut(tmp_path / "run")
    shutil.rmtree(tmp_path / "a.zarr")
    build(tmp_path / "a.zarr", samples=16, seed=1)
    result = craft("train", "--resume", "run")
    assert result.exit_code == EXIT_CHECK_FAILED, result.output
    changed = f"the cache {tmp_path / 'a.zarr'} is not the one of the checkpoint"
    assert changed in " ".join(result.stderr.split())
    assert logged_steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]  # nothing was changed
    assert craft("train", "--resume", "run", "--accept-changes").exit_code == 0


def test_other_data_in_its_place_is_refused(
    craft: Callable[..., Any], old_data: Any, new_data: Any, tmp_path: Path
) -> None:
    shutil.copytree(new_data.root, tmp_path / "data")
    plain = ("--mode", "none", "--policy", str(TEACHER_FOLDER), "--dataset", "data")
    assert craft("train", *SHORT, *plain, "-o", "run").exit_code == 0
    cut(tmp_path / "run")
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(old_data.root, tmp_path / "data")
    result = craft("train", "--resume", "run")
    assert result.exit_code == EXIT_CHECK_FAILED, result.output
    assert "the dataset data is not the one of the checkpoint" in result.stderr


def test_an_edited_policy_under_lora_weights_is_refused(
    craft: Callable[..., Any], new_data: Any, tmp_path: Path
) -> None:
    shutil.copytree(TEACHER_FOLDER, tmp_path / "base")
    lora: tuple[str, ...] = ("--mode", "none", "--policy", "base", "--dataset", str(new_data.root))
    lora = (*lora, "--lora", "r=2,alpha=4,targets=q_proj")
    assert craft("train", *SHORT, *lora, "-o", "run").exit_code == 0
    cut(tmp_path / "run")
    file = tmp_path / "base/model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "q_proj" in name)
    save_file({**weights, name: weights[name] + 1e-3}, file, metadata={"format": "pt"})
    result = craft("train", "--resume", "run")
    assert result.exit_code == EXIT_CHECK_FAILED, result.output
    assert "the policy under the LoRA weights" in result.stderr


def test_an_older_checkpoint_can_be_chosen(
    craft: Callable[..., Any], run: Path, finished: Path
) -> None:
    (run / "evaluations").mkdir()
    (run / "evaluations/a.json").write_text("{}")
    result = craft("train", "--resume", run, "--from", 2)
    assert result.exit_code == 0, result.output
    assert "Resuming after step 2 of 6" in result.stdout
    aside = run / "set-aside-from-000002"
    assert f"kept in {aside}: 2 checkpoints" in result.stdout
    names = ["000004", "000006", "evaluations", "metrics.jsonl", "summary.json"]
    assert sorted(entry.name for entry in aside.iterdir()) == names
    assert logged_steps(run) == logged_steps(aside) == [1, 2, 3, 4, 5, 6]
    assert not (run / "evaluations").exists()
    last = f"checkpoints/last/{WEIGHTS}"
    assert (run / last).read_bytes() == (finished / last).read_bytes()
    # Again: what came after is set aside once more, beside the first.
    assert craft("train", "--resume", run, "--from", 2).exit_code == 0
    assert (run / "set-aside-from-000002-2/000006").is_dir()


def test_a_run_cut_short_from_an_older_checkpoint_is_not_complete(run: Path) -> None:
    config = TrainConfig(resume=run, from_=2)
    trainer = open_run(config, {}, Processes()).trainer()

    def stop(step: int) -> None:
        found = RunSummary.read(run)
        assert found
        assert not found.complete
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.run(stop, lambda _: None, lambda _: None)
    assert (run / "checkpoints/last").readlink() == Path("000002")


@pytest.mark.parametrize("link", [True, False])
def test_the_steps_that_there_are_are_listed(
    craft: Callable[..., Any], run: Path, link: bool
) -> None:
    if link:
        result = craft("train", "--resume", run, "--from", 3)
        assert result.exit_code == EXIT_USAGE
    else:  # as a killed --from leaves it
        shutil.rmtree(run / "checkpoints/000006")
        result = craft("train", "--resume", run)
        assert result.exit_code == 1
    assert "there are 2, 4" in result.stderr


@pytest.mark.parametrize("option", [("--from", 2), ("--accept-changes",)])
def test_options_of_resuming_need_a_run(craft: Callable[..., Any], option: Any) -> None:
    result = craft("train", *option)
    assert result.exit_code == EXIT_USAGE
    assert f"{option[0]} needs --resume" in result.stderr


def test_a_run_that_another_process_has_continued_is_not_resumed(half: Path) -> None:
    opened = open_run(TrainConfig(resume=half), {}, Processes())
    (half / "checkpoints/last").unlink()
    (half / "checkpoints/last").symlink_to("000002")
    with pytest.raises(CraftError, match="changed while it was opened"):
        opened.trainer().run(*[lambda _: None] * 3)


def test_a_run_is_locked_while_it_trains(
    craft: Callable[..., Any], half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = open_run(TrainConfig(resume=half), {}, Processes()).trainer()
    seen = []

    def on_step(step: int) -> None:
        seen.append(craft("train", "--resume", half).stderr)
        seen.append(craft("train", "-o", half, "--overwrite").stderr)

    trainer.run(on_step, lambda _: None, lambda _: None)
    assert len(seen) == 4
    assert all("is in use" in text for text in seen)
    with run_locked(half):
        pass


def test_seeds_have_a_range(craft: Callable[..., Any]) -> None:
    result = craft("train", "--seed", 2**64)
    assert result.exit_code == EXIT_USAGE
    assert f"--seed is {2**64}, above {2**64 - 1}" in result.stderr
    torch.manual_seed(TrainConfig(seed=2**64 - 1).seed)


def test_a_run_that_would_retain_nothing_is_refused(craft: Callable[..., Any]) -> None:
    result = craft("train", "--steps", 4, "--retention-every", 4)
    assert result.exit_code == EXIT_USAGE
    assert "This run would retain nothing" in result.stderr


@pytest.mark.parametrize(("bad", "code"), [((2, 3, 4), EXIT_CHECK_FAILED), ((2,), 0)])
def test_skipped_steps_are_counted(
    craft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...], code: int
) -> None:
    from craftcli.engine.execution import Execution

    clip, steps = Execution.clip, []

    def nan_sometimes(self: Execution, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        norm, means = clip(self, *rest)
        steps.append(norm)
        return norm * torch.nan if len(steps) in bad else norm, means

    monkeypatch.setattr(Execution, "clip", nan_sometimes)
    short = ("--mode", "none", "--batch-size", 2, "--device", "cpu", "--steps", 5)
    result = craft("train", *short, "-o", "run")
    assert result.exit_code == code, result.output
    assert f"{len(bad)} of 5 steps were not finite and skipped" in result.stderr
    if code:
        assert "Most steps of the run changed nothing" in result.stderr
    assert json.loads(Path("run/summary.json").read_text())["skipped"] == len(bad)
