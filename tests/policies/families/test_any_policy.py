"""Any list of layers of any policy can be retained, by its path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny.act import ACT, STATE_ONLY
from tiny.diffusion import DIFFUSION
from tiny.family import Family
from tiny.pi05 import PI05
from tiny.vqbet import VQBET
from tiny.world import write_dataset

from craftcli.cache.build.build import build_cache
from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Layout, LossKind, Mode, Pooling
from craftcli.config.cache import CacheConfig
from craftcli.config.train import TrainConfig
from craftcli.engine.retention.gradient_reach import find_reach
from craftcli.engine.retention.imitation import Imitation
from craftcli.engine.retention.retention import open_retention
from craftcli.errors import CraftError
from craftcli.evaluation.cache_check import rerun_teacher
from craftcli.policies.base import FeatureRequest
from craftcli.policies.families import registry
from craftcli.policies.families.any_policy import SEED, GenericAdapter
from craftcli.policies.layer_paths import layer_lists
from craftcli.policies.layouts import as_tokens, layout_of
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset

type Build = Callable[..., Path]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture
def unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Family], Checkpoint]:
    """A policy of LeRobot's for which craft has no adapter."""

    def open_family(family: Family) -> Checkpoint:
        monkeypatch.setattr(registry, "ADAPTERS", ())
        return load_checkpoint(str(family.make(tmp_path / "policy")), device="cpu")

    return open_family


@pytest.fixture
def built(tmp_path: Path, data: Path) -> Build:
    def build(teacher: Checkpoint, **settings: Any) -> Path:
        fixed = {"output": tmp_path / "a.zarr", "samples": 6, "batch_size": 4, "device": "cpu"}
        fixed |= {"images": "embed"}
        config = CacheConfig(**{**fixed, **settings})
        dataset = open_dataset(str(data), root=None, policy_config=teacher.policy.config)
        build_cache(config, teacher, dataset, on_plan=lambda _: None, on_rows=lambda _: None)
        return tmp_path / "a.zarr"

    return build


def losses(cache: Path, student: Checkpoint, mode: str = "hidden") -> dict[Mode, float]:
    config = TrainConfig(mode=mode, anchor_batch_size=3, cache=cache, device="cpu")
    retention = open_retention(config, student, cache)
    term = retention.terms[0]
    assert isinstance(term, Imitation)
    found: dict[Mode, float] = {}
    for number in (0, 1):
        for name, loss in term.losses(number, loss=LossKind.NMSE).items():
            found[name] = max(found.get(name, 0), loss.total.item())
    return found


def test_a_stack_by_its_path_is_the_stack_by_its_name(data: Path, tmp_path: Path) -> None:
    opened = load_checkpoint(str(ACT.make(tmp_path / "policy")), device="cpu")
    opened.policy.eval()
    dataset = open_dataset(str(data), root=None, policy_config=opened.policy.config)
    batch = opened.preprocess(read_rows(dataset, [0, 3, 5]))
    by_path = opened.for_stack("model.encoder.layers")
    named = opened.adapter.features(
        opened.policy, batch, FeatureRequest(stack="encoder", layers=(0, 1))
    )
    request = FeatureRequest(
        stack="model.encoder.layers", layers=(0, 1), layout=Layout.SBD, output=True
    )
    found = by_path.adapter.features(opened.policy, batch, request)
    for layer, states in named.hidden.items():
        assert torch.equal(found.hidden[layer], states)
    whole = opened.adapter.features(opened.policy, batch, FeatureRequest(output=True))
    assert found.output is not None
    assert whole.output is not None
    assert torch.equal(found.output.values, whole.output.values)
    assert found.masks.text.all()
    assert not found.masks.action.any()


@pytest.mark.parametrize(
    ("family", "path", "layout", "mode"),
    [
        (ACT, "model.encoder.layers", "sbd", "hidden+action"),
        (VQBET, "vqbet.policy.transformer.h", "bsd", "hidden"),
        (PI05, "vision", "bsd", "hidden"),
        (DIFFUSION, "diffusion.unet.mid_modules", "bds", "hidden+action"),
    ],
    ids=["act", "vqbet", "pi05", "diffusion"],
)
def test_a_path_serves_a_family_that_has_an_adapter(
    family: Family, path: str, layout: str, mode: str, built: Build, tmp_path: Path
) -> None:
    teacher = load_checkpoint(str(family.make(tmp_path / "policy")), device="cpu")
    path = next(there for there in layer_lists(teacher.policy) if path in there)
    settings = {"layout": layout} if family is DIFFUSION else {}
    cache = built(teacher, stack=path, layers="0,1", kind=mode, **settings)
    manifest = CacheReader.open(cache).manifest
    assert (manifest.stack, manifest.layout) == (path, layout)
    assert max(losses(cache, teacher, mode).values()) < 1e-8
    assert all(row.passed for row in rerun_teacher(CacheReader.open(cache), teacher, [0, 5]))
    with torch.no_grad():
        for parameter in teacher.policy.parameters():
            parameter.mul_(1.05)
    other = TrainConfig(mode=mode, anchor_batch_size=3, other_student=True, device="cpu")
    term = open_retention(other, teacher, cache).terms[0]
    assert all(loss.total.item() > 1e-6 for loss in term.losses(0).values())


@pytest.mark.parametrize(
    ("family", "path", "draws"),
    [
        (STATE_ONLY, "model.decoder.layers", False),
        (DIFFUSION, "diffusion.unet.mid_modules", True),
    ],
    ids=["act", "diffusion"],
)
def test_a_policy_without_an_adapter_is_retained_by_a_path(
    family: Family, path: str, draws: bool, built: Build, unknown: Any
) -> None:
    teacher = unknown(family)
    assert isinstance(teacher.adapter, GenericAdapter)
    cache = built(teacher, stack=path, actions="data", layout="bds" if draws else None)
    reader = CacheReader.open(cache)
    assert reader.manifest.kinds == ("hidden",)  # nothing else can be had, and nothing was asked
    assert (f"inputs/{SEED}" in reader.array_names()) == draws
    before = torch.get_rng_state()
    assert losses(cache, teacher)[Mode.HIDDEN] < 1e-8  # in other batches than the teacher's
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_reach_what_leads_to_the_layers(built: Build, unknown: Any, data: Path) -> None:
    teacher = unknown(STATE_ONLY)
    cache = built(teacher, stack="model.encoder.layers", actions="data")
    config = TrainConfig(mode="hidden", anchor_batch_size=3, device="cpu")
    retention = open_retention(config, teacher, cache)
    dataset = open_dataset(str(data), root=None, policy_config=teacher.policy.config)
    batch = teacher.preprocess(read_rows(dataset, [0, 1]))
    reach = find_reach(teacher.policy, teacher.adapter, retention.terms, batch)
    assert any(name.startswith("model.encoder.layers") for name in reach.retained)
    assert not any(name.startswith("model.decoder") for name in reach.retained)
    assert "model.action_head.weight" in reach.downstream


def test_own_actions_come_from_the_policy_or_are_refused(
    built: Build, unknown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = unknown(STATE_ONLY)
    cache = built(teacher, stack="model.decoder.layers")
    assert CacheReader.open(cache).manifest.actions == "teacher"
    assert losses(cache, teacher)[Mode.HIDDEN] < 1e-8
    shorter = teacher.policy.predict_action_chunk
    monkeypatch.setattr(teacher.policy, "predict_action_chunk", lambda b: shorter(b)[:, :2])
    with pytest.raises(CraftError, match=r"own actions.*--actions data"):
        built(teacher, stack="model.decoder.layers", overwrite=True)


def test_without_a_stack_the_error_lists_the_layers(built: Build, unknown: Any) -> None:
    teacher = unknown(STATE_ONLY)
    with pytest.raises(CraftError) as caught:
        built(teacher)
    message = str(caught.value)
    assert "type 'act' have no adapter" in message
    assert "model.encoder.layers (2)" in message
    assert "model.decoder.layers (2)" in message
    assert "--stack" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "hidden+action"}, "kind action does not work.*--kind hidden"),
        ({"kind": "hidden+token_ce", "actions": "teacher"}, "kind token_ce does not work"),
        ({"stack": "model.encoder.blocks"}, r"no list of layers.*nothing there.*model\.encoder"),
        ({"stack": "model.action_head.weight"}, "no list of layers at model.action_head"),
        ({"stack": "model.encoder.norm"}, "no list of layers at"),
        ({"layers": "7"}, "No layer 7"),
        ({"pooling": Pooling.VISION_TEXT}, "has no image tokens.*--pooling action_tokens"),
        ({"layout": "bd"}, "layout bd does not fit"),
        ({"stack": "model.vae_encoder.layers"}, "cannot be read.*never calls them"),
    ],
)
def test_what_cannot_be_is_refused(
    settings: dict[str, Any], message: str, built: Build, unknown: Any
) -> None:
    fixed = {"stack": "model.encoder.layers", "actions": "data"}
    with pytest.raises(CraftError, match=message):
        built(unknown(STATE_ONLY), **{**fixed, **settings})


def test_a_policy_that_needs_more_than_tensors_is_refused(built: Build, unknown: Any) -> None:
    teacher = unknown(STATE_ONLY)
    forward = type(teacher.policy).forward
    teacher.policy.forward = lambda batch: forward(teacher.policy, {**batch, "n": batch["task"]})
    with pytest.raises(CraftError, match=r"cannot be run on anchors.*KeyError.*own_policy"):
        built(teacher, stack="model.encoder.layers", actions="data")


def test_a_layout_is_for_paths() -> None:
    with pytest.raises(CraftError, match="--layout needs a --stack that is a path"):
        CacheConfig(stack="encoder", layout=Layout.SBD)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (lambda b: (b, 7, 5), Layout.BSD),
        (lambda b: (7, b, 5), Layout.SBD),
        (lambda b: (2, b, 3), Layout.SBD),
        (lambda b: (b, 5, 4, 4), Layout.BDS),
        (lambda b: (b, 5), Layout.BD),
        (lambda b: (b * 7, 5), None),
        (lambda b: (b, b, 5), None),
        (lambda b: (7, 5, b), None),
        (lambda b: (3, 5, 7), None),
    ],
)
def test_the_batch_is_the_axis_that_changes_with_it(
    shape: Callable[[int], tuple[int, ...]], layout: Layout | None
) -> None:
    shapes = {rows: shape(rows) for rows in (2, 3)}
    if layout is None:
        with pytest.raises(CraftError, match=r"Cannot find the layout.*--layout"):
            layout_of(shapes, stack="model.layers")
        return
    assert layout_of(shapes, stack="model.layers") is layout
    assert as_tokens(torch.zeros(shapes[3]), layout).shape[0] == 3


def test_the_commands_need_the_path_once(
    craft: Callable[..., Any], unknown: Any, data: Path, tmp_path: Path
) -> None:
    unknown(STATE_ONLY)
    both = ("--policy", tmp_path / "policy", "--dataset", data, "--device", "cpu")
    path = ("--stack", "model.decoder.layers", "--actions", "data")
    built = craft("cache", "build", *both, *path, "--samples", "8")
    assert built.exit_code == 0, built.output
    assert "in stack model.decoder.layers (axes of its states: sbd)" in built.stdout
    small = ("--steps", "3", "--batch-size", "2", "--anchor-batch-size", "4", "--log-every", "1")
    ran = craft("train", *both, *small, "--mode", "hidden+replay", "-o", "run")
    assert ran.exit_code == 0, ran.output
    assert load_checkpoint(str(tmp_path / "run"), device="cpu").policy_type == "act"
    refused = craft("train", *both, *small, "--mode", "action", "-o", "other")
    assert refused.exit_code == 1
    assert "cannot serve --mode action" in refused.stderr
    default = craft("train", *both, *small, "-o", "default")
    assert default.exit_code == 1
    assert "cannot serve --mode action" in default.stderr
    fix = " ".join(default.stderr.partition("Fix:")[2].split())
    assert fix.startswith("hold less with --mode hidden, or build one")
    held = craft("train", *both, *small, "--mode", "hidden", "-o", "default")
    assert held.exit_code == 0, held.output
