"""Bad input: what / why / fix, the right exit code, no traceback, and nothing half-written."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from craftcli.cache.storage.zarr_layout import attributes_digest
from craftcli.choices import Pooling
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER

BUILD = ("cache", "build", "--samples", "16")
TRAIN = ("train", "--steps", "2", "--batch-size", "4")
READERS = [("cache", "inspect"), (*TRAIN, "--cache")]
LAYER_NORM = "model.language_model.layers.1.input_layernorm.weight"

type Refused = Callable[..., str]
type Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def refused(craft: Callable[..., Any], tmp_path: Path) -> Refused:
    """Run a command that must be refused and leave the folder unchanged; returns its error."""

    def listing() -> dict[Path, bytes | None]:
        return {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")}

    def run(*arguments: Any, exit_code: int = 1) -> str:
        before = listing()
        result = craft(*arguments)
        assert result.exit_code == exit_code, result.output
        assert "Traceback" not in result.output
        assert "has no explanation" not in result.stderr
        error = [line for line in result.stderr.splitlines() if line.startswith(("Error", "  "))]
        starts = [line.split()[0] for line in error]
        assert starts == ["Error:", "Why:", "Fix:"], result.stderr
        assert listing() == before
        return "\n".join(error)

    return run


@pytest.fixture
def own_cache(cache: Path, tmp_path: Path) -> Path:
    """A cache that a test may change."""
    return Path(shutil.copytree(cache, tmp_path / "anchors.zarr"))


@pytest.fixture
def own_policy(tmp_path: Path) -> Path:
    """A copy of the demo's teacher that a test may change."""
    return Path(shutil.copytree(TEACHER_FOLDER, tmp_path / "policy"))


@pytest.fixture
def own_data(new_data: Any, tmp_path: Path) -> Path:
    """A copy of the demo's new data that a test may change."""
    return Path(shutil.copytree(new_data.root, tmp_path / "data"))


def edit_json(file: Path, change: Change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_manifest(cache: Path, change: Change) -> None:
    """As someone would who knows the format: sealed again."""

    def edit(metadata: dict[str, Any]) -> None:
        attributes = metadata["attributes"]
        change(attributes["craft"])
        attributes["digest"] = attributes_digest(attributes)

    edit_json(cache / "zarr.json", edit)


def edit_weights(policy: Path, change: Change) -> None:
    weights = load_file(policy / "model.safetensors")
    change(weights)
    save_file(weights, policy / "model.safetensors")


def fill(value: float) -> Change:
    """Set one of the norms inside the language model to a value."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        (name,) = (name for name in weights if name.endswith(LAYER_NORM))
        weights[name].fill_(value)

    return change


class TestCaches:
    @pytest.mark.parametrize("reader", READERS)
    def test_missing(self, refused: Refused, reader: tuple[str, ...]) -> None:
        error = refused(*reader, "nowhere.zarr")
        assert "No cache at nowhere.zarr." in error
        assert "nothing is there" in error
        assert "craft cache build" in error

    @pytest.mark.parametrize("reader", READERS)
    def test_half_built(
        self, refused: Refused, own_cache: Path, tmp_path: Path, reader: tuple[str, ...]
    ) -> None:
        own_cache.rename(tmp_path / "anchors.zarr.partial")
        error = refused(*reader, "anchors.zarr")
        assert "half-built" in error
        assert "anchors.zarr.partial" in error
        assert "continue it with craft cache build --resume" in error

    @pytest.mark.parametrize("reader", READERS)
    def test_not_marked_complete(
        self, refused: Refused, own_cache: Path, reader: tuple[str, ...]
    ) -> None:
        edit_manifest(own_cache, lambda manifest: manifest.update(complete=False))
        assert "is incomplete" in refused(*reader, own_cache)

    @pytest.mark.parametrize("reader", READERS)
    def test_a_file(self, refused: Refused, tmp_path: Path, reader: tuple[str, ...]) -> None:
        (tmp_path / "shard_0000.pt").write_bytes(b"PK")
        error = refused(*reader, "shard_0000.pt")
        assert "shard_0000.pt is not a craft cache." in error
        assert "it is not a folder" in error

    @pytest.mark.parametrize("reader", READERS)
    def test_some_folder(self, refused: Refused, tmp_path: Path, reader: tuple[str, ...]) -> None:
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos/cat.jpg").write_bytes(b"meow")
        assert "photos is not a craft cache." in refused(*reader, "photos")

    @pytest.mark.parametrize("reader", READERS)
    def test_a_lost_chunk(self, refused: Refused, own_cache: Path, reader: tuple[str, ...]) -> None:
        (own_cache / "hidden/vlm.2/c/0/0/0").unlink()
        error = refused(*reader, own_cache)
        assert "hidden/vlm.2 chunk 0 (rows 0 to 31): the file is missing" in error

    def test_of_another_kind_than_the_mode(self, refused: Refused, own_cache: Path) -> None:
        edit_manifest(own_cache, lambda manifest: manifest.update(kinds=["action"]))
        error = refused(*TRAIN)
        assert "cannot serve --mode hidden" in error
        assert "it holds action" in error

    def test_from_a_newer_craft(self, refused: Refused, own_cache: Path) -> None:
        edit_manifest(own_cache, lambda manifest: manifest.update(format_version="3.0"))
        assert "newer craft" in refused(*TRAIN)

    @pytest.mark.parametrize("batch_size", [33, 1000])
    def test_fewer_anchors_than_a_batch(
        self, refused: Refused, cache: Path, batch_size: int
    ) -> None:
        error = refused(*TRAIN, "--cache", cache, "--anchor-batch-size", batch_size)
        assert "32 usable anchors, fewer than a batch" in error
        assert f"uses {batch_size} of them" in error
        assert "--anchor-batch-size 32" in error

    def test_a_batch_of_all_anchors_is_fine(self, craft: Callable[..., Any], cache: Path) -> None:
        result = craft(*TRAIN, "--cache", cache, "--anchor-batch-size", 32)
        assert result.exit_code == 0, result.output

    def test_of_another_teacher(
        self, refused: Refused, cache: Path, own_policy: Path, new_data: Any
    ) -> None:
        edit_weights(own_policy, lambda weights: next(iter(weights.values())).add_(0.01))
        error = refused(
            *TRAIN, "--policy", own_policy, "--dataset", new_data.root, "--cache", cache
        )
        assert "was built with another teacher" in error
        assert "weights_digest differ" in error
        assert "config_digest" not in error
        assert str(TEACHER_FOLDER) in error
        assert str(own_policy) in error

    def test_of_other_statistics(
        self, refused: Refused, cache: Path, own_policy: Path, new_data: Any
    ) -> None:
        (file,) = own_policy.glob("policy_preprocessor*.safetensors")
        save_file({name: value + 1 for name, value in load_file(file).items()}, file)
        error = refused(
            *TRAIN, "--policy", own_policy, "--dataset", new_data.root, "--cache", cache
        )
        assert "processor_digest" in error
        assert "weights_digest" not in error


class TestAnchors:
    @pytest.mark.parametrize("layer", ["4", "-5", "-2,17"])
    def test_layer_out_of_range(self, refused: Refused, layer: str) -> None:
        error = refused(*BUILD, "--layers", layer, exit_code=2)
        assert f"No layer {layer.split(',')[-1]} in this stack." in error
        assert "-4 to 3" in error

    @pytest.mark.parametrize("layers", ["last", "1;2", "1,", "1.5"])
    def test_layers_that_are_no_numbers(self, refused: Refused, layers: str) -> None:
        assert "Cannot read the layers" in refused(*BUILD, "--layers", layers, exit_code=2)

    def test_a_layer_named_twice(self, refused: Refused) -> None:
        assert "more than once" in refused(*BUILD, "--layers", "3,-1", exit_code=2)

    def test_unknown_stack(self, refused: Refused) -> None:
        error = refused(*BUILD, "--stack", "expert", exit_code=2)
        assert "no stack 'expert'" in error
        assert "--stack vlm" in error

    def test_unknown_pooling(self, craft: Callable[..., Any], tmp_path: Path) -> None:
        result = craft(*BUILD, "--pooling", "median")
        assert result.exit_code == 2
        assert "'median' is not one of" in result.stderr
        assert "action_tokens" in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_unknown_pooling_in_a_file(self, refused: Refused, tmp_path: Path) -> None:
        (tmp_path / "craft.toml").write_text('pooling = "median"')
        assert "not one of mean_image_tokens" in refused(
            *BUILD, "--config", "craft.toml", exit_code=2
        )

    def test_pooling_of_tokens_that_the_policy_lacks(
        self, refused: Refused, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from craftcli.policies.families.pi0_fast import Pi0FastAdapter

        monkeypatch.setattr(Pi0FastAdapter, "token_kinds", frozenset({"image", "text"}))
        monkeypatch.setattr(Pi0FastAdapter, "default_pooling", Pooling.VISION_TEXT)
        error = refused(*BUILD, "--pooling", "mean_action_tokens", exit_code=2)
        assert "pooling mean_action_tokens does not work for this policy" in error
        assert "pi0_fast has no action tokens" in error
        assert "--pooling vision_text" in error

    def test_more_anchors_than_frames(self, refused: Refused) -> None:
        """Pitfall 14."""
        error = refused("cache", "build", "--samples", 721, exit_code=2)
        assert "Cannot select 721 anchors." in error
        assert "the dataset has 720 frames" in error
        assert "--samples 720" in error

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_hidden_states_that_are_not_finite(
        self, refused: Refused, own_policy: Path, old_data: Any, value: float
    ) -> None:
        """Pitfall 17."""
        edit_weights(own_policy, fill(value))
        error = refused(*BUILD, "--policy", own_policy, "--dataset", old_data.root)
        assert "outputs are not finite" in error
        assert re.search(r"all 16 rows have NaN or infinity, dataset frames \[\d+, ", error)
        assert "nothing was written" in error


class TestPoliciesAndData:
    @pytest.mark.parametrize("command", [BUILD, TRAIN])
    @pytest.mark.parametrize(
        ("given", "missing"), [("--policy", "--dataset"), ("--dataset", "--policy")]
    )
    def test_one_without_the_other(
        self, refused: Refused, command: tuple[str, ...], given: str, missing: str
    ) -> None:
        assert f"{missing} is needed" in refused(*command, given, "me/mine", exit_code=2)

    @pytest.mark.parametrize("device", ["abacus", "cuda:99", "cpu:x"])
    def test_a_device_that_does_not_exist(self, refused: Refused, device: str) -> None:
        error = refused(*BUILD, "--device", device, exit_code=2)
        assert f"The device '{device}' cannot be used." in error
        assert "--device auto" in error

    @pytest.mark.parametrize("policy", ["./nowhere", "nobody/nothing", "not a name", "folder"])
    def test_no_policy(self, refused: Refused, new_data: Any, tmp_path: Path, policy: str) -> None:
        (tmp_path / "folder").mkdir()
        error = refused(*BUILD, "--policy", policy, "--dataset", new_data.root)
        assert policy in error
        assert "policy" in error

    @pytest.mark.parametrize("damage", ["truncated", "absent", "tensor missing"])
    def test_weights_that_lerobot_would_replace_by_random_ones(
        self, refused: Refused, own_policy: Path, new_data: Any, damage: str
    ) -> None:
        weights = own_policy / "model.safetensors"
        if damage == "truncated":
            weights.write_bytes(weights.read_bytes()[:-1000])
        elif damage == "absent":
            weights.unlink()
        else:
            edit_weights(own_policy, lambda tensors: tensors.popitem())
        error = refused(
            *TRAIN, "--mode", "none", "--policy", own_policy, "--dataset", new_data.root
        )
        assert str(weights) in error

    @pytest.mark.parametrize("command", [BUILD, (*TRAIN, "--mode", "none")])
    @pytest.mark.parametrize("dataset", ["folder", "./nowhere", "nobody/nothing", "not a name"])
    def test_no_dataset(
        self, refused: Refused, tmp_path: Path, command: tuple[str, ...], dataset: str
    ) -> None:
        (tmp_path / "folder").mkdir()
        error = refused(*command, "--policy", TEACHER_FOLDER, "--dataset", dataset)
        assert dataset in error
        can_be_on_the_hub = "/" in dataset.removeprefix("./") or " " in dataset
        advice = "the folder of a downloaded" if can_be_on_the_hub else "give --dataset a folder"
        assert advice in error

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda f: f.pop("observation.state"), "no observation.state"),
            (lambda f: f.pop("action"), "no action"),
            (lambda f: f["action"].update(shape=[7]), "action is (7,), not (2,)"),
            (
                lambda f: f.update(wrist=f.pop("observation.images.top")),
                "no camera of observation.images.top (it has wrist)",
            ),
        ],
    )
    def test_a_dataset_without_the_policys_features(
        self, refused: Refused, own_data: Path, change: Change, why: str
    ) -> None:
        edit_json(own_data / "meta/info.json", lambda info: change(info["features"]))
        error = refused(*TRAIN, "--mode", "none", "--policy", TEACHER_FOLDER, "--dataset", own_data)
        assert "does not fit the policy" in error
        assert why in error

    @pytest.mark.parametrize("broken", ["meta/info.json", "data/chunk-000/file-000.parquet"])
    @pytest.mark.parametrize("content", [b"", b"{}", b"PAR1"])
    def test_a_damaged_dataset(
        self, refused: Refused, own_data: Path, broken: str, content: bytes
    ) -> None:
        (own_data / broken).write_bytes(content)
        error = refused(*TRAIN, "--mode", "none", "--policy", TEACHER_FOLDER, "--dataset", own_data)
        assert f"Cannot read the dataset {own_data}." in error

    def test_an_incomplete_dataset(self, refused: Refused, own_data: Path) -> None:
        shutil.rmtree(own_data / "data")
        error = refused(*TRAIN, "--mode", "none", "--policy", TEACHER_FOLDER, "--dataset", own_data)
        assert f"The dataset {own_data} is incomplete." in error

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_loss_that_is_not_finite_stops_the_run(
        self, craft: Callable[..., Any], own_policy: Path, new_data: Any, value: float
    ) -> None:
        """Pitfall 17."""
        edit_weights(own_policy, fill(value))
        where = ("--policy", own_policy, "--dataset", new_data.root)
        result = craft(*TRAIN, "--mode", "none", *where, "-o", "run")
        assert result.exit_code == 1
        assert re.search(r"Error: Training stopped at step \d+\.", result.stderr)
        assert "steps in a row were not finite" in result.stderr
        assert "loss is nan" in result.stderr
        assert "Fix: " in result.stderr
        assert "Traceback" not in result.output
        assert "the state is saved" in result.stderr
        assert Path("run/checkpoints/last/craft_state.json").is_file()


class TestOutputs:
    def test_an_existing_cache(self, refused: Refused, own_cache: Path) -> None:
        error = refused(*BUILD)
        assert "anchors.zarr already exists" in error
        assert "--overwrite" in error

    def test_an_existing_run(self, refused: Refused, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/craft_config.json").write_text("{}\n")
        error = refused(*TRAIN, "--mode", "none", "-o", "run")
        assert "The run run already exists." in error
        assert "--overwrite" in error

    @pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
    @pytest.mark.parametrize("command", [BUILD, (*TRAIN, "--mode", "none")])
    @pytest.mark.parametrize("kind", ["folder", "file"])
    def test_what_is_not_ours_is_never_replaced(
        self,
        refused: Refused,
        tmp_path: Path,
        command: tuple[str, ...],
        overwrite: tuple[str, ...],
        kind: str,
    ) -> None:
        thesis = tmp_path / "thesis"
        if kind == "folder":
            thesis.mkdir()
            (thesis / "metrics.jsonl").write_text("of another program")
            thesis /= "thesis.tex"
        thesis.write_text("years of work")
        error = refused(*command, "-o", "thesis", *overwrite)
        assert "thesis" in error
        assert "choose another" in error

    def test_a_file_where_builds_put_their_parts(self, refused: Refused, tmp_path: Path) -> None:
        (tmp_path / "anchors.zarr.partial").write_text("mine")
        assert "anchors.zarr.partial: it is not a craft cache" in refused(*BUILD)

    @pytest.mark.parametrize("command", [BUILD, (*TRAIN, "--mode", "none")])
    def test_an_output_that_cannot_be_written(
        self, refused: Refused, tmp_path: Path, command: tuple[str, ...]
    ) -> None:
        (tmp_path / "file").write_text("")
        assert "Cannot write" in refused(*command, "-o", "file/below")

    def test_a_failed_build_keeps_the_cache_it_would_replace(
        self, refused: Refused, own_cache: Path, own_policy: Path, old_data: Any
    ) -> None:
        edit_weights(own_policy, fill(math.inf))
        refused(*BUILD, "--overwrite", "--policy", own_policy, "--dataset", old_data.root)

    def test_a_refused_run_keeps_the_run_it_would_replace(
        self, refused: Refused, tmp_path: Path
    ) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/metrics.jsonl").write_text("{}\n")
        refused(*TRAIN, "--overwrite", "-o", "run", "--cache", "nowhere.zarr")
