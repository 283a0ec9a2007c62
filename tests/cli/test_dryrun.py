"""`craft dryrun`: checks, real steps, nothing left behind."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from craftcli.cache.storage.zarr_layout import attributes_digest
from craftcli.choices import Pooling, StoreDtype
from craftcli.policies.families.pi0_fast import Pi0FastAdapter

SHORT = ("dryrun", "--steps", "2", "--batch-size", "4")
NUMBERED = re.compile(r"^(\d)\. (✓|✗ failed:) (.*)", re.MULTILINE)


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go during a test."""
    folder = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def of_another_teacher(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with other weights in its manifest."""
    copy = Path(shutil.copytree(cache, tmp_path_factory.mktemp("other") / "other.zarr"))
    metadata = json.loads((copy / "zarr.json").read_text())
    attributes = metadata["attributes"]
    attributes["craft"]["teacher"]["weights_digest"] = "0" * 64
    attributes["digest"] = attributes_digest(attributes)
    (copy / "zarr.json").write_text(json.dumps(metadata))
    return copy


@pytest.mark.parametrize(
    ("chosen", "mode", "reached", "behind"),
    [
        (
            (),
            "hidden+action",
            "78 of 78 trained tensors, 100 % of the trained weights: lm_head 0.033M trained, "
            "0.033M held, ",
            "; nothing trainable is free to drift behind what is retained",
        ),
        (
            ("--mode", "hidden"),
            "hidden",
            "76 of 76 trained tensors, 100 % of the trained weights: ",
            "; frozen behind the deepest retained layer (8 %): lm_head.weight, norm.weight",
        ),
    ],
    ids=["default", "hidden"],
)
def test_checks_are_numbered_and_steps_are_real(
    craft: Callable[..., Any],
    tmp_path: Path,
    scratch: Path,
    chosen: tuple[str, ...],
    mode: str,
    reached: str,
    behind: str,
) -> None:
    result = craft(*SHORT, *chosen)
    assert result.exit_code == 0, result.output
    numbers, marks, titles = zip(*NUMBERED.findall(result.stdout), strict=True)
    assert numbers == ("1", "2", "3", "4", "5", "6")
    assert set(marks) == {"✓"}
    for title, start in zip(
        titles,
        (
            "Configuration is valid",
            "Policy and dataset fit: craft_tiny_pi0_fast, 0.42M parameters",
            "Statistics normalise the data: observation.state: the teacher's. action: the "
            "teacher's. The loss is the cross-entropy of tokens.",
            "Cache matches the teacher: the run makes 480 frames of the new data under 3 old "
            "instructions; no old data is needed; tried with a temporary cache: 32 rows",
            "L_ret = 0 at the teacher's weights: ",
            f"Retention reaches what is trained: {reached}vision_tower 0.117M trained, 0.117M held",
        ),
        strict=True,
    ):
        assert title.startswith(start)
    assert titles[-1].endswith(behind)
    assert re.search(r"^ steps +2 +\(flag\)", result.stdout, re.MULTILINE)
    shown = rf"^Step 1/2 \| loss=.* \| mode={re.escape(mode)} \| L_ret=0 \|"
    assert re.search(shown, result.stdout, re.M)
    assert re.search(r"^Step 2/2 \| loss=", result.stdout, re.M)
    assert re.search(r"^2 steps, \d\.\d+ s each, peak memory [\d.]+ [MG]iB$", result.stdout, re.M)
    assert list(tmp_path.iterdir()) == []
    assert list(scratch.iterdir()) == []


def test_three_steps_by_default(craft: Callable[..., Any], cache: Path) -> None:
    result = craft("dryrun", "--batch-size", 4, "--cache", cache)
    assert result.exit_code == 0
    assert re.findall(r"^Step (\d)/3", result.stdout, re.MULTILINE) == ["1", "2", "3"]
    assert re.search(r"^ steps +3 +\(default\)", result.stdout, re.MULTILINE)


def test_json_is_one_document_and_nothing_else(craft: Callable[..., Any], cache: Path) -> None:
    result = craft(*SHORT, "--cache", cache, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["passed"] is True
    assert all(check["passed"] for check in document["checks"])
    assert [entry["step"] for entry in document["steps"]] == [1, 2]
    assert document["steps"][0]["l_ret"] == pytest.approx(0, abs=1e-6)
    assert document["step_s"] > 0
    assert document["peak_memory_bytes"] > 100 * 2**20
    assert "1. ✓ Configuration is valid" in result.stderr


def test_a_cache_in_the_folder_is_used_and_kept(
    craft: Callable[..., Any], cache: Path, tmp_path: Path, scratch: Path
) -> None:
    shutil.copytree(cache, tmp_path / "anchors.zarr")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    result = craft(*SHORT)
    assert result.exit_code == 0
    assert "anchors.zarr: 32 rows" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert list(scratch.iterdir()) == []


def test_mode_none_has_no_checks_of_a_cache(craft: Callable[..., Any]) -> None:
    result = craft(*SHORT, "--mode", "none", "--cache", "nowhere.zarr")
    assert result.exit_code == 0
    assert [number for number, *_ in NUMBERED.findall(result.stdout)] == ["1", "2", "3"]
    assert "L_ret" not in result.stdout


def test_settings_without_effect_are_named(craft: Callable[..., Any], cache: Path) -> None:
    result = craft(*SHORT, "--cache", cache, "--surgery", "none", "--project-when", "violated")
    assert result.exit_code == 0
    message = " ".join(result.stderr.split())
    assert "have no effect here: --project-when (without --surgery)." in message
    failed = craft(*SHORT, "--cache", "nowhere.zarr", "--lambda-nu", 0.5)
    assert failed.exit_code == 3
    assert "--lambda-nu (without --controller nupi)" in " ".join(failed.stderr.split())


@pytest.mark.parametrize("mode", ["hidden", "hidden+action"])
def test_freeze_downstream_is_rehearsed(craft: Callable[..., Any], cache: Path, mode: str) -> None:
    result = craft(*SHORT, "--cache", cache, "--mode", mode, "--freeze-downstream")
    assert result.exit_code == 0
    frozen = "frozen behind the deepest retained layer (8 %): lm_head.weight, norm.weight"
    assert frozen in result.stdout


def test_little_that_is_held_is_a_warning(
    craft: Callable[..., Any], build: Callable[..., Path], tmp_path: Path
) -> None:
    """With an early layer, most of what LoRA trains lies behind it."""
    cache = build(tmp_path / "early.zarr", layers="0", samples=8)
    early = ("--cache", cache, "--mode", "hidden", "--anchor-batch-size", 4, "--steps", 1)
    result = craft(*SHORT, *early, "--lora", "r=2,targets=down_proj;lm_head")
    assert result.exit_code == 0, result.output
    assert "free to drift behind the deepest retained layer" in result.stdout
    assert re.search(r"Warning: retention holds \d+ % of the trained weights", result.stderr)


@pytest.mark.parametrize(
    ("pooling", "dtype"),
    [
        *((pooling, StoreDtype.FLOAT32) for pooling in Pooling),
        (Pooling.ACTION_TOKENS, StoreDtype.FLOAT16),
        (Pooling.ACTION_TOKENS, StoreDtype.BFLOAT16),
    ],
)
def test_l_ret_is_zero_for_every_pooling_and_precision(
    craft: Callable[..., Any],
    build: Callable[..., Path],
    tmp_path: Path,
    pooling: Pooling,
    dtype: StoreDtype,
) -> None:
    path = build(tmp_path / "c.zarr", samples=8, pooling=pooling, dtype=dtype)
    more = ("--cache", path, "--anchor-batch-size", 8, "--steps", 1, "--json")
    result = craft(*SHORT, *more)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("as_json", [False, True])
def test_a_cache_of_another_teacher_fails_the_check(
    craft: Callable[..., Any],
    of_another_teacher: Path,
    tmp_path: Path,
    scratch: Path,
    as_json: bool,
) -> None:
    result = craft(*SHORT, "--cache", of_another_teacher, *(["--json"] if as_json else []))
    assert result.exit_code == 3
    shown = NUMBERED.findall(result.output)
    assert [mark for _, mark, _ in shown] == ["✓", "✓", "✓", "✗ failed:"]
    assert "weights_digest differ" in shown[3][2]
    assert "Step" not in result.output
    if as_json:
        document = json.loads(result.stdout)
        assert document["passed"] is False
        assert document["checks"][-1]["passed"] is False
    assert list(tmp_path.iterdir()) == []
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "failed", "why"),
    [
        (("--cache", "nowhere.zarr"), 2, "No cache at nowhere.zarr. Why: nothing is there. Fix: "),
        (("--policy", "./nobody", "--dataset", "./nothing"), 2, "No policy at ./nobody. Why: "),
        (("--device", "abacus"), 2, "The device 'abacus' cannot be used. Why: "),
    ],
)
def test_a_failed_check_is_named_and_gives_exit_code_3(
    craft: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], failed: int, why: str
) -> None:
    result = craft(*SHORT, *arguments)
    assert result.exit_code == 3
    number, mark, text = NUMBERED.findall(result.stdout)[-1]
    assert (int(number), mark) == (failed, "✗ failed:")
    assert why in text
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_l_ret_that_is_not_zero_fails_the_check(
    craft: Callable[..., Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pitfall 6: the student is run in another way than its teacher was."""
    from craftcli.policies.families.pi0_fast import Pi0FastAdapter

    original = Pi0FastAdapter.features

    def other(self: Any, policy: Any, batch: Any, wanted: Any) -> Any:
        batch["observation.language.tokens"] = batch["observation.language.tokens"].flip(1)
        return original(self, policy, batch, wanted)

    monkeypatch.setattr(Pi0FastAdapter, "features", other)
    result = craft(*SHORT, "--cache", cache)
    assert result.exit_code == 3
    number, mark, text = NUMBERED.findall(result.stdout)[-1]
    assert (number, mark) == ("5", "✗ failed:")
    assert "no longer reproduces the cached outputs" in text


def test_unusable_settings_are_a_usage_error(craft: Callable[..., Any]) -> None:
    result = craft("dryrun", "--steps", 0)
    assert result.exit_code == 2
    assert "--steps is 0, below 1" in result.stderr


@pytest.mark.slow
def test_the_real_command_prints_json_and_leaves_nothing(tmp_path: Path) -> None:
    """In a process of its own, where libraries may print past Python's stdout."""
    script = Path(sys.executable).with_name("craft")
    done = subprocess.run(
        [script, *SHORT, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["token_ce", "action", "replay"])
def test_a_mode_is_rehearsed_on_a_cache_made_for_it(craft: Callable[..., Any], mode: str) -> None:
    result = craft(*SHORT, "--mode", mode, "--anchor-batch-size", 4)
    assert result.exit_code == 0, result.output
    assert f"mode={mode}" in result.stdout


def test_recomputing_is_rehearsed(craft: Callable[..., Any], monkeypatch: Any) -> None:
    enabled = []
    monkeypatch.setattr(
        Pi0FastAdapter,
        "enable_gradient_checkpointing",
        lambda _self, policy: enabled.append(policy),
    )
    assert craft(*SHORT, "--gradient-checkpointing").exit_code == 0
    assert len(enabled) == 1
