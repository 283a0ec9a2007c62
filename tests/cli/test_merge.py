"""`craft merge` writes a policy between two that everything opens."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import make_policy
from safetensors.torch import load_file, save_file

from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE
from craftcli.policies.base import FeatureRequest
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import load_checkpoint

LORA = "r=4,targets=q_proj;v_proj"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain run and one of adapters, two steps each."""
    from typer.testing import CliRunner

    from craftcli.cli.app import app

    folder = tmp_path_factory.mktemp("runs")
    for name, extra in (("plain", []), ("lora", ["--lora", LORA])):
        settings = ["--mode", "none", "--steps", "2", "--lr", "0.01", "--batch-size", "2"]
        output = ["--output", str(folder / name)]
        result = CliRunner().invoke(
            app, ["train", *settings, *output, *extra], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
    return folder


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def student_weights(run: Path) -> dict[str, Any]:
    return weights(run / "checkpoints/last/pretrained_model")


def predicted(folder: Path, data: Any) -> Any:
    opened = load_checkpoint(str(folder), device="cpu")
    opened.policy.eval()
    wanted = FeatureRequest(stack="vlm", with_actions=True, output=True)
    with torch.no_grad():
        batch = opened.preprocess(read_rows(data, [0, 3]))
        output = opened.adapter.features(opened.policy, batch, wanted).output
    assert output is not None
    return output.values


@pytest.mark.parametrize("alpha", [0, 1, 0.5])
def test_the_ends_are_the_policies_and_the_middle_is_their_mean(
    craft: Callable[..., Any], runs: Path, alpha: float, tmp_path: Path
) -> None:
    result = craft("merge", runs / "plain", "--alpha", alpha, "-o", "out")
    assert result.exit_code == 0, result.stderr
    merged, teacher, student = (
        weights(tmp_path / "out"),
        weights(TEACHER_FOLDER),
        student_weights(runs / "plain"),
    )
    assert merged.keys() == student.keys()
    moved = [name for name in student if not torch.equal(student[name], teacher[name])]
    assert moved
    for name, tensor in merged.items():
        expected = {0.0: teacher[name], 1.0: student[name]}.get(alpha)
        if expected is None:
            assert torch.allclose(tensor, (teacher[name] + student[name]) / 2, atol=1e-7)
        else:
            assert torch.equal(tensor, expected)
    assert "Wrote out: 0.42M parameters" in result.stdout


def test_groups_go_their_own_way(craft: Callable[..., Any], runs: Path, tmp_path: Path) -> None:
    groups = ["--group", "vision_tower=0", "--group", "*lm_head*=1"]
    result = craft("merge", runs / "plain", "--alpha", "0.5", *groups, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["output"] == "merged-0.5"
    assert report["groups"] == {"vision_tower": 0, "*lm_head*": 1}
    assert report["teacher"] == str(TEACHER_FOLDER)
    assert not report["other_processor"]
    merged, teacher = weights(tmp_path / "merged-0.5"), weights(TEACHER_FOLDER)
    student = student_weights(runs / "plain")
    counted = {"0": 0, "0.5": 0, "1": 0}
    for name in merged:
        if "vision_tower" in name:
            counted["0"] += 1
            assert torch.equal(merged[name], teacher[name])
        elif "lm_head" in name:
            counted["1"] += 1
            assert torch.equal(merged[name], student[name])
        else:
            counted["0.5"] += 1
    assert report["tensors_by_alpha"] == counted


def test_merged_adapters_predict_what_the_adapted_policy_does(
    craft: Callable[..., Any], runs: Path, new_data: Any, tmp_path: Path
) -> None:
    result = craft("merge", runs / "lora", "--alpha", "1", "-o", "out", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["adapters_merged"]
    assert report["teacher"] is None
    assert weights(tmp_path / "out").keys() == weights(TEACHER_FOLDER).keys()
    adapted, plain = predicted(runs / "lora", new_data), predicted(TEACHER_FOLDER, new_data)
    merged = predicted(tmp_path / "out", new_data)
    assert torch.allclose(merged, adapted, atol=1e-4)
    assert (merged - plain).abs().max() > 100 * (merged - adapted).abs().max()


def test_half_of_an_adapted_policy_is_half_of_what_adapters_add(
    craft: Callable[..., Any], runs: Path, tmp_path: Path
) -> None:
    for alpha in ("0.5", "1"):
        assert craft("merge", runs / "lora", "--alpha", alpha).exit_code == 0
    half, whole = weights(tmp_path / "merged-0.5"), weights(tmp_path / "merged-1")
    for name, teacher in weights(TEACHER_FOLDER).items():
        assert torch.allclose(half[name], (teacher + whole[name]) / 2, atol=1e-7)


def test_a_full_disk_leaves_nothing(craft: Callable[..., Any], runs: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may be larger, as on a disk that is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        result = craft("merge", runs / "plain", "--output", "merged")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == 1
    assert "Cannot write to merged" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_lerobot_opens_what_was_written(
    craft: Callable[..., Any], runs: Path, new_data: Any, tmp_path: Path
) -> None:
    assert craft("merge", runs / "lora", "-o", "out").exit_code == 0
    folder = tmp_path / "out"
    config = PreTrainedConfig.from_pretrained(str(folder))
    assert not config.use_peft
    config.pretrained_path, config.device = str(folder), "cpu"
    policy = make_policy(config, ds_meta=new_data.meta)
    for name, tensor in weights(folder).items():
        assert torch.equal(policy.state_dict()[name], tensor)


def test_low_precision_stays_what_it_is(
    craft: Callable[..., Any], runs: Path, tmp_path: Path
) -> None:
    """A bfloat16 policy is averaged in float32 and written as bfloat16."""
    low = tmp_path / "low"
    shutil.copytree(runs / "plain/checkpoints/last/pretrained_model", low)
    config = json.loads((low / "config.json").read_text())
    (low / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    result = craft("merge", low, "--teacher", TEACHER_FOLDER, "-o", "out")
    assert result.exit_code == 0, result.stderr
    kept = load_checkpoint(str(low), device="cpu").policy.state_dict()
    assert {torch.bfloat16, torch.float32} == {tensor.dtype for tensor in kept.values()}
    for name, tensor in weights(tmp_path / "out").items():
        assert tensor.dtype == kept[name].dtype


def test_an_output_is_replaced_only_when_asked_and_ours(
    craft: Callable[..., Any], runs: Path, tmp_path: Path
) -> None:
    assert craft("merge", runs / "lora", "--alpha", "1", "-o", "out").exit_code == 0
    again = craft("merge", runs / "lora", "--alpha", "0", "-o", "out")
    assert again.exit_code == 1
    assert "--overwrite" in again.stderr
    assert craft("merge", runs / "lora", "--alpha", "0", "-o", "out", "--overwrite").exit_code == 0
    assert torch.equal(
        *(next(iter(weights(f).values())) for f in (tmp_path / "out", TEACHER_FOLDER))
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("all of it")
    refused = craft("merge", runs / "lora", "-o", "mine", "--overwrite")
    assert refused.exit_code == 1
    assert "Refusing to overwrite mine" in refused.stderr
    assert (mine / "thesis.txt").exists()
    for listed in (True, False):  # an earlier version listed no files
        record = json.loads((tmp_path / "out/craft_merge.json").read_text())
        if not listed:
            kept = {name: value for name, value in record.items() if name != "files"}
            (tmp_path / "out/craft_merge.json").write_text(json.dumps(kept))
        (tmp_path / "out/thesis.txt").write_text("all of it")
        refused = craft("merge", runs / "lora", "--alpha", "1", "-o", "out", "--overwrite")
        assert refused.exit_code == 1
        assert "thesis.txt would be lost" in refused.stderr
        (tmp_path / "out/thesis.txt").unlink()
    (tmp_path / "out/evaluations").mkdir()
    (tmp_path / "out/evaluations/a.json").write_text("{}")
    assert craft("merge", runs / "lora", "--alpha", "1", "-o", "out", "--overwrite").exit_code == 0


@pytest.mark.parametrize("file", ["model.safetensors", "policy_preprocessor.json", "config.json"])
def test_a_changed_merge_is_not_opened(craft: Callable[..., Any], runs: Path, file: str) -> None:
    """Its weights are as good as those of a run, and a bit of them flips as easily."""
    assert craft("merge", runs / "plain", "--alpha", "0.5", "-o", "out").exit_code == 0
    content = bytearray(Path("out", file).read_bytes())
    content[-3] ^= 1
    Path("out", file).write_bytes(content)
    data = ("--dataset", "anything")
    for command in (
        ("eval", "out"),
        ("info", "--policies", "--policy", "out"),
        ("cache", "build", "--policy", "out", *data),
        ("train", "--policy", "out", *data, "--mode", "none"),
        ("merge", "out", "--teacher", "demo", "-o", "between"),
        ("merge", runs / "plain", "--teacher", "out", "-o", "between"),
    ):
        result = craft(*command)
        assert result.exit_code == EXIT_CHECK_FAILED, result.output
        assert f"{file} has changed" in result.stderr
    assert not Path("between").exists()


def test_a_failed_merge_leaves_nothing(
    craft: Callable[..., Any], runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from craftcli import whole_files

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_files, "move_folder", fail)
    result = craft("merge", runs / "lora", "--alpha", "1", "-o", "out")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_another_architecture_is_refused_by_name(
    craft: Callable[..., Any], runs: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(TEACHER_FOLDER, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "mlp_dim": config["mlp_dim"] * 2}))
    opened = load_untrained(other)
    save_file(opened, other / "model.safetensors", metadata={"format": "pt"})
    result = craft("merge", runs / "plain", "--teacher", other, "-o", "out")
    assert result.exit_code == 1
    assert "of their tensors differ" in result.stderr
    assert "mlp.gate_proj.weight is" in result.stderr
    assert not (tmp_path / "out").exists()


def load_untrained(folder: Path) -> dict[str, Any]:
    from lerobot.policies.factory import get_policy_class

    config = PreTrainedConfig.from_pretrained(str(folder))
    policy = get_policy_class(config.type)(config)
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--alpha", "1.5"], "--alpha", EXIT_USAGE),
        (["--group", "vision_tower"], "NAME=ALPHA", EXIT_USAGE),
        (["--group", "vision_tower=2"], "from 0 to 1", EXIT_USAGE),
        (["--group", "vision_tower=nan"], "from 0 to 1", EXIT_USAGE),
        (["--group", "wheels=0"], "vision_tower", EXIT_USAGE),
        (["--teacher", "/nowhere"], "No policy at /nowhere", 1),
    ],
)
def test_what_cannot_be_merged_is_refused(
    craft: Callable[..., Any], runs: Path, arguments: list[str], message: str, code: int
) -> None:
    result = craft("merge", runs / "plain", *arguments, "-o", "out")
    assert result.exit_code == code
    assert message in result.stderr
    assert not Path("out").exists()


def test_a_policy_without_a_known_teacher_asks_for_one(craft: Callable[..., Any]) -> None:
    result = craft("merge", TEACHER_FOLDER, "-o", "out")
    assert result.exit_code == EXIT_USAGE
    assert "--teacher" in result.stderr
    assert craft("merge", TEACHER_FOLDER, "--alpha", "1", "-o", "out").exit_code == 0


def test_adapters_from_elsewhere_have_their_own_policy_as_teacher(
    craft: Callable[..., Any], runs: Path, tmp_path: Path
) -> None:
    """As lerobot-train writes them: no file of craft's beside."""
    shutil.copytree(runs / "lora/checkpoints/last/pretrained_model", tmp_path / "theirs")
    result = craft("merge", "theirs", "--alpha", "0", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["teacher"] == str(TEACHER_FOLDER)
    for name, tensor in weights(tmp_path / "merged-0").items():
        assert torch.equal(tensor, weights(TEACHER_FOLDER)[name])


def test_a_run_that_is_not_there_is_refused(craft: Callable[..., Any]) -> None:
    result = craft("merge", "./nothing", "-o", "out")
    assert result.exit_code == 1
    assert "No policy at ./nothing" in result.stderr
