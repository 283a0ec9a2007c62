"""The example's policy and its adapter, found as an installed package's are."""

import importlib
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import install
from tiny.world import input_features, output_features, save, write_dataset

from craftcli.cache.build.build import build_cache
from craftcli.choices import LossKind
from craftcli.config.cache import CacheConfig
from craftcli.config.train import TrainConfig
from craftcli.engine.retention.imitation import Imitation
from craftcli.engine.retention.retention import open_retention
from craftcli.errors import CraftError
from craftcli.policies.base import FeatureRequest
from craftcli.policies.families.registry import (
    ENTRY_POINT_GROUP,
    adapter_for,
    register_policy_plugins,
)
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.catalogue import family_info
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset

FOLDER = Path(__file__).parents[2] / "examples/own_policy"
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text("utf-8"))["project"]

INCOMPLETE = """
from craftcli.policies.base import PolicyAdapter

class NoMethods(PolicyAdapter):
    policy_types = ("tdmpc",)

class NoPooling(PolicyAdapter):
    policy_types, stack_names, default_stack = ("tdmpc",), ("layers",), "layers"
    default_layers, token_kinds = (-1,), frozenset({"action"})
    stacks = input_keys = features = compute_dtype = lambda *_: None
"""
"""Adapters of a package that its author has not finished."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The example, installed, and a checkpoint of its policy."""
    site = tmp_path_factory.mktemp("site")
    install(site, PROJECT["name"], PROJECT["entry-points"])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.syspath_prepend(str(FOLDER))
        register_policy_plugins.cache_clear()
        register_policy_plugins()
        modeling = importlib.import_module("lerobot_policy_mixer.modeling_mixer")
        torch.manual_seed(0)
        config = modeling.MixerConfig(
            device="cpu",
            push_to_hub=False,
            input_features=input_features(cameras=0),
            output_features=output_features(),
        )
        yield save(tmp_path_factory.mktemp("mixer") / "policy", modeling.MixerPolicy(config))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture
def opened(policy: Path) -> Checkpoint:
    return load_checkpoint(str(policy), device="cpu")


def test_lerobot_and_craft_find_the_package(opened: Checkpoint) -> None:
    assert type(opened.adapter).__name__ == "MixerAdapter"
    assert opened.adapter.stacks(opened.policy).keys() == set(opened.adapter.stack_names)
    info = family_info("mixer")
    assert (info.adapter, info.tested) == ("lerobot_policy_mixer", False)
    assert info.modes[:2] == ("hidden", "action")


def test_the_adapter_is_a_page(policy: Path) -> None:
    text = (FOLDER / "lerobot_policy_mixer/adapter_mixer.py").read_text("utf-8")
    of_the_class = text[text.index("class ") :].splitlines()
    assert len(of_the_class) <= 30


def test_tapped_states_are_those_of_the_policys_own_forward(opened: Checkpoint, data: Path) -> None:
    opened.policy.eval()
    dataset = open_dataset(str(data), root=None, policy_config=opened.policy.config)
    batch = opened.preprocess(read_rows(dataset, [0, 4, 9]))
    seen: list[torch.Tensor] = []
    for layer in opened.policy.layers:
        layer.register_forward_hook(lambda _module, _args, output: seen.append(output))
    opened.policy(batch)
    wanted = FeatureRequest(stack="layers", layers=(0, 1, 2), output=True)
    found = opened.adapter.features(opened.policy, batch, wanted)
    assert all(torch.equal(found.hidden[i], seen[i]) for i in range(3))
    assert found.output is not None
    assert torch.equal(found.output.values, opened.policy.predict_action_chunk(batch))
    keys = opened.adapter.input_keys(opened.policy, batch, wanted)
    alone = opened.adapter.features(opened.policy, {k: batch[k][1:2] for k in keys}, wanted)
    torch.testing.assert_close(alone.hidden[2], found.hidden[2][1:2])


def test_nothing_is_lost_at_the_teachers_weights(
    opened: Checkpoint, data: Path, tmp_path: Path
) -> None:
    config = CacheConfig(output=tmp_path / "a.zarr", kind="hidden+action", samples=8, device="cpu")
    dataset = open_dataset(str(data), root=None, policy_config=opened.policy.config)
    build_cache(config, opened, dataset, on_plan=lambda _: None, on_rows=lambda _: None)
    settings = TrainConfig(mode="hidden+action", anchor_batch_size=4, device="cpu")
    opened.policy.train()
    term = open_retention(settings, opened, tmp_path / "a.zarr").terms[0]
    assert isinstance(term, Imitation)
    assert all(x.total.item() < 1e-8 for x in term.losses(0, loss=LossKind.NMSE).values())


def test_the_commands_of_its_readme_run(
    craft: Callable[..., Any], policy: Path, data: Path, tmp_path: Path
) -> None:
    both = ("--policy", policy, "--dataset", data, "--device", "cpu")
    built = craft("cache", "build", *both, "--samples", "8", "--kind", "hidden+action")
    assert built.exit_code == 0, built.output
    steps = ("--steps", "5", "--batch-size", "4", "--anchor-batch-size", "4")
    ran = craft("train", *both, *steps, "--mode", "hidden+action", "-o", "run", "--json")
    assert ran.exit_code == 0, ran.output
    last = tmp_path / "run/checkpoints/last/pretrained_model"
    assert json.loads((last / "config.json").read_text())["type"] == "mixer"
    assert load_checkpoint(str(tmp_path / "run"), device="cpu").policy_type == "mixer"
    told = craft("info", "--policies", "--policy", policy, "--json")
    assert json.loads(told.stdout)["stacks"] == {"layers": 3}


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"act": "somewhere:Adapter"}, "two adapters.*'act'.*other_package.*craft itself"),
        ({"mixer": "somewhere:Adapter"}, "two adapters.*'mixer'.*lerobot_policy_mixer"),
        ({"tdmpc": "nowhere.at.all:Adapter"}, "'tdmpc' cannot be used.*ModuleNotFoundError"),
        ({"tdmpc": "pathlib:Path"}, "'tdmpc' cannot be used.*not a PolicyAdapter"),
        ({"tdmpc": "incomplete:NoMethods"}, "'tdmpc' cannot be used.*abstract.*compute_dtype"),
        (
            {"tdmpc": "incomplete:NoPooling"},
            "'tdmpc' cannot be used.*NoPooling does not set default_pooling, output_kind;",
        ),
    ],
)
def test_adapters_that_cannot_be_are_told(
    entry: dict[str, str], told: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "other_package", {ENTRY_POINT_GROUP: entry})
    (tmp_path / "incomplete.py").write_text(INCOMPLETE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CraftError, match=told):
        adapter_for(next(iter(entry)))
