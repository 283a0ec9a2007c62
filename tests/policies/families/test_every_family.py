"""Every family: the adapter returns what the policy itself computes, the same every time."""

import copy
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES
from tiny.family import Family, hooked, keyword_of

from craftcli.cache.build.build import build_cache
from craftcli.cache.layers import resolve_layers
from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Images, Kind, LossKind, Mode
from craftcli.config.cache import CacheConfig
from craftcli.engine.retention.anchor_dataset import open_anchor_dataset
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.engine.retention.imitation import Imitation
from craftcli.errors import CraftError
from craftcli.policies.base import FeatureRequest, Features
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset
from craftcli.policies.lerobot.weight_files import WEIGHTS_FILE
from craftcli.policies.pooling import needs_action_tokens, pool, required_tokens

ROWS = [0, 2, 5, 9]
SEEDS = [11, 12, 13, 14]

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
stacks = pytest.mark.parametrize(
    ("family", "stack"),
    [
        pytest.param(family, stack, id=f"{family.name}-{stack}")
        for family in FAMILIES
        for stack in family.reached
    ],
)


@dataclass(frozen=True, kw_only=True)
class Opened:
    checkpoint: Checkpoint
    dataset: Any
    batch: dict[str, Any]

    @property
    def policy(self) -> Any:
        return self.checkpoint.policy

    @property
    def adapter(self) -> Any:
        return self.checkpoint.adapter

    def request(self, stack: str, *, output: bool = False, layers: Any = None) -> FeatureRequest:
        """All layers of a stack, with its own pooling."""
        count = len(self.adapter.stack(self.policy, stack))
        return FeatureRequest(
            stack=stack,
            layers=tuple(range(count)) if layers is None else layers,
            with_actions=needs_action_tokens(self.adapter.pooling_of(stack)),
            output=output,
        )

    def anchors(self, *, own_actions: bool = False) -> dict[str, Any]:
        with torch.no_grad():
            anchors: dict[str, Any] = self.adapter.anchor_inputs(
                self.policy, dict(self.batch), seeds=SEEDS, own_actions=own_actions
            )
        return anchors

    def features(self, batch: dict[str, Any], request: FeatureRequest) -> Features:
        with torch.no_grad():
            found: Features = self.adapter.features(self.policy, dict(batch), request)
        return found


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """The checkpoint of a family, written once; tests must not change it."""

    @functools.cache
    def folder(family: Family) -> Path:
        return family.make(tmp_path_factory.mktemp("tiny") / family.name)

    return folder


@pytest.fixture(scope="session")
def opened(
    folder_of: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Family], Opened]:
    """A family's policy in evaluation mode, its data, and four preprocessed rows of them."""

    @functools.cache
    def data(write: Callable[[Path], object]) -> Path:
        root = tmp_path_factory.mktemp("data") / "tiny"
        write(root)
        return root

    @functools.cache
    def open_family(family: Family) -> Opened:
        checkpoint = load_checkpoint(str(folder_of(family)), device="cpu")
        checkpoint.policy.eval()
        dataset = open_dataset(
            "tiny/data", root=str(data(family.write_data)), policy_config=checkpoint.policy.config
        )
        batch = checkpoint.preprocess(read_rows(dataset, ROWS))
        return Opened(checkpoint=checkpoint, dataset=dataset, batch=batch)

    return open_family


def assert_same(one: Features, other: Features, **tolerance: Any) -> None:
    """Equal hidden states, masks and outputs, to the last bit unless a tolerance is given."""
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    assert one.hidden.keys() == other.hidden.keys()
    for layer, states in one.hidden.items():
        torch.testing.assert_close(states, other.hidden[layer], **tolerance)
    for kind in ("image", "text", "action"):
        assert torch.equal(getattr(one.masks, kind), getattr(other.masks, kind))
    assert one.masks.action_span == other.masks.action_span
    assert (one.output is None) == (other.output is None)
    if one.output is not None and other.output is not None:
        torch.testing.assert_close(one.output.values, other.output.values, **tolerance)
        assert torch.equal(one.output.mask, other.output.mask)


def assert_states(found: Features, layer: int, expected: torch.Tensor, *, alone: bool) -> None:
    """The states of a layer to the last bit; of a stack run alone, its valid tokens to rounding."""
    states = found.hidden[layer]
    if alone:
        assert states.shape == expected.shape
        valid = found.masks.prefix | found.masks.action
        torch.testing.assert_close(states[valid], expected[valid], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(states, expected)


def test_a_reference_that_fails_leaves_no_hook_on_the_policy_that_tests_share() -> None:
    policy = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(ImportError):
        hooked(policy, ["0"], lambda: importlib.import_module("nowhere_to_be_found"))
    with pytest.raises(ImportError):
        keyword_of(policy, "0", "input", lambda: importlib.import_module("nowhere_to_be_found"))
    assert not policy[0]._forward_hooks
    assert not policy[0]._forward_pre_hooks


@families
def test_the_defaults_fit_the_policy(family: Family, opened: Any) -> None:
    it = opened(family)
    assert it.adapter.stacks(it.policy).keys() == family.reached.keys() == family.untouched.keys()
    assert it.adapter.stacks(it.policy).keys() == set(it.adapter.stack_names)
    count = len(it.adapter.stack(it.policy, it.adapter.default_stack))
    assert resolve_layers(it.adapter.default_layers, count)
    assert it.adapter.pooling_of(it.adapter.default_stack) == it.adapter.default_pooling


@families
def test_a_stack_or_a_layer_that_is_not_there_tells_those_that_are(
    family: Family, opened: Any
) -> None:
    it = opened(family)
    with pytest.raises(CraftError, match="no stack 'nowhere'") as caught:
        it.adapter.stack(it.policy, "nowhere")
    assert f"has {', '.join(sorted(family.reached))}." in caught.value.why
    for stack in family.reached:
        count = len(it.adapter.stack(it.policy, stack))
        with pytest.raises(CraftError, match=f"No layer {count} in this stack.*-{count} to"):
            resolve_layers((count,), count)


@stacks
def test_tapped_states_equal_those_of_the_policys_own_forward(
    family: Family, stack: str, opened: Any
) -> None:
    it = opened(family)
    batch = {**it.batch, **family.draw(it.policy, it.batch)}
    found = it.features(batch, it.request(stack))
    expected = family.reference(it.policy, batch, stack)
    assert found.hidden.keys() == expected.keys()
    for layer, states in expected.items():
        assert_states(found, layer, states, alone=stack in family.alone)


@stacks
def test_layers_of_a_stack_share_their_shape_and_their_kinds_of_token(
    family: Family, stack: str, opened: Any
) -> None:
    it = opened(family)
    found = it.features(it.anchors(), it.request(stack))
    masks = {kind: getattr(found.masks, kind) for kind in ("image", "text", "action")}
    rows, length, _ = next(iter(found.hidden.values())).shape
    assert rows == len(ROWS)
    assert len({states.shape for states in found.hidden.values()}) == 1
    assert {mask.shape for mask in masks.values()} == {(rows, length)}
    assert torch.stack(list(masks.values())).sum(0).max() == 1
    there = {kind for kind, mask in masks.items() if mask.any()}
    assert there <= it.adapter.tokens_of(stack) <= it.adapter.token_kinds
    pooling = it.adapter.pooling_of(stack)
    assert required_tokens(pooling) <= there
    for states in found.hidden.values():
        pooled = pool(states, found.masks, pooling)
        assert pooled.mask.any(1).all()
        assert pooled.vectors.isfinite().all()


@stacks
def test_a_shorter_run_gives_the_same(family: Family, stack: str, opened: Any) -> None:
    """Whether it stops at the first layer or goes on to the output, and once more."""
    it = opened(family)
    anchors = it.anchors()
    whole = it.features(anchors, it.request(stack, output=True))
    assert whole.output is not None
    shortest = it.features(anchors, it.request(stack, layers=(0,)))
    assert shortest.output is None
    assert_states(shortest, 0, whole.hidden[0], alone=stack in family.alone)
    again = it.features(anchors, it.request(stack))
    for layer, states in whole.hidden.items():
        assert_states(again, layer, states, alone=stack in family.alone)
    assert_same(again, Features(hidden=again.hidden, masks=whole.masks))


@families
def test_the_output_alone_is_the_output_beside_hidden_states(family: Family, opened: Any) -> None:
    it = opened(family)
    anchors = it.anchors()
    alone = it.features(anchors, FeatureRequest(stack=it.adapter.default_stack, output=True)).output
    beside = it.features(anchors, it.request(it.adapter.default_stack, output=True)).output
    assert torch.equal(alone.values, beside.values)
    assert torch.equal(alone.mask, beside.mask)
    assert alone.mask.shape == alone.values.shape[:2]
    assert alone.mask.any(1).all()


@stacks
def test_gradients_meet_what_leads_to_the_layer_and_nothing_else(
    family: Family, stack: str, opened: Any
) -> None:
    it = opened(family)
    policy = copy.deepcopy(it.policy)
    request = it.request(stack)
    found = it.adapter.features(policy, it.anchors(), request)
    last = found.hidden[max(request.layers)]
    (last * torch.randn(last.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    touched = {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    for start in family.reached[stack]:
        assert any(name.startswith(start) for name in touched), start
    for start in family.untouched[stack]:
        assert any(name.startswith(start) for name, _ in policy.named_parameters()), start
        assert not [name for name in touched if name.startswith(start)]


@families
@pytest.mark.parametrize("own_actions", [False, True])
def test_anchor_inputs_are_a_function_of_seed_and_row(
    family: Family, own_actions: bool, opened: Any
) -> None:
    it = opened(family)
    chance = torch.get_rng_state()
    together = it.anchors(own_actions=own_actions)
    again = it.anchors(own_actions=own_actions)
    row = it.checkpoint.preprocess(read_rows(it.dataset, ROWS[2:3]))
    with torch.no_grad():
        alone = it.adapter.anchor_inputs(it.policy, row, seeds=SEEDS[2:3], own_actions=own_actions)
    assert torch.equal(torch.get_rng_state(), chance)
    for key in it.adapter.input_keys(
        it.policy, together, it.request(it.adapter.default_stack, output=True)
    ):
        assert torch.equal(together[key], again[key])
        # Matrix products of another shape round differently.
        torch.testing.assert_close(alone[key], together[key][2:3], rtol=1e-3, atol=1e-4)


@stacks
def test_own_actions_make_labels_unnecessary(family: Family, stack: str, opened: Any) -> None:
    it = opened(family)
    request = it.request(stack, output=True)
    labels = {"action", "action_is_pad", "action.tokens", "action.token_mask"}
    unlabelled = {key: value for key, value in it.batch.items() if key not in labels}
    with torch.no_grad():
        anchors = it.adapter.anchor_inputs(it.policy, unlabelled, seeds=SEEDS, own_actions=True)
    assert_same(it.features(anchors, request), it.features(it.anchors(own_actions=True), request))


@stacks
@pytest.mark.parametrize("output", [False, True])
def test_the_input_keys_are_all_that_is_read(
    family: Family, stack: str, output: bool, opened: Any
) -> None:
    it = opened(family)
    request, anchors = it.request(stack, output=output), it.anchors()
    keys = it.adapter.input_keys(it.policy, anchors, request)
    assert len(set(keys)) == len(keys)
    assert all(isinstance(anchors[key], torch.Tensor) for key in keys)
    assert set(it.adapter.image_keys(it.policy, anchors)) <= set(keys)
    kept = {key: anchors[key] for key in keys}
    assert_same(it.features(kept, request), it.features(anchors, request))


@families
def test_a_camera_that_the_policy_needs_is_named_when_missing(family: Family, opened: Any) -> None:
    it = opened(family)
    anchors = it.anchors()
    request = it.request(it.adapter.default_stack)
    if family.camera is None:
        present = it.adapter.image_keys(it.policy, anchors)
        rest = {key: value for key, value in anchors.items() if key not in present[1:]}
        assert it.features(rest, request).hidden
        return
    del anchors[family.camera]
    with pytest.raises(CraftError, match=family.camera):
        it.features(anchors, request)


@families
def test_rows_do_not_depend_on_their_neighbours(family: Family, opened: Any) -> None:
    it = opened(family)
    anchors = it.anchors()
    request = it.request(it.adapter.default_stack, output=True)
    keys = it.adapter.input_keys(it.policy, anchors, request)
    whole = it.features(anchors, request)
    alone = it.features({key: anchors[key][1:2] for key in keys}, request)
    for layer, states in alone.hidden.items():
        torch.testing.assert_close(states, whole.hidden[layer][1:2], rtol=1e-3, atol=1e-4)


@families
def test_autocast_to_bfloat16_changes_features_by_its_rounding_only(
    family: Family, opened: Any
) -> None:
    it = opened(family)
    anchors = it.anchors()
    request = it.request(it.adapter.default_stack)
    exact = it.features(anchors, request)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = it.features(anchors, request)
    for layer, states in exact.hidden.items():
        error = (rounded.hidden[layer].float() - states).norm() / states.norm()
        assert 0 < error < 0.05


@families
def test_a_saved_policy_reloads_to_the_same_features(
    family: Family, opened: Any, tmp_path: Path
) -> None:
    it = opened(family)
    policy = copy.deepcopy(it.policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    policy.save_pretrained(tmp_path)
    it.checkpoint.preprocess.save_pretrained(tmp_path)
    it.checkpoint.postprocess.save_pretrained(tmp_path)
    again = load_checkpoint(str(tmp_path), device="cpu").policy.eval()
    request, anchors = it.request(it.adapter.default_stack, output=True), it.anchors()
    with torch.no_grad():
        expected = it.adapter.features(policy, dict(anchors), request)
        found = it.adapter.features(again, dict(anchors), request)
    assert_same(found, expected)
    assert not torch.equal(found.output.values, it.features(anchors, request).output.values)


@families
def test_incomplete_weights_are_noticed(family: Family, folder_of: Any, tmp_path: Path) -> None:
    for file in folder_of(family).iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / WEIGHTS_FILE)
    stack = next(iter(family.reached.values()))[-1]
    lost = next(name for name in weights if name.startswith(stack) and name.endswith("weight"))
    del weights[lost]
    save_file(weights, tmp_path / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(CraftError, match=r"did not load completely|cannot be opened"):
        load_checkpoint(str(tmp_path), device="cpu")


def anchors_of(it: Opened, output: Path, stack: str, images: Images) -> AnchorSet:
    """Build a cache of hidden states and outputs, and open it as a student would."""
    config = CacheConfig(
        output=output,
        kind="hidden+action",
        stack=stack,
        layers=",".join(map(str, it.request(stack).layers)),
        samples=6,
        batch_size=4,
        images=images,
        device="cpu",
    )
    build_cache(config, it.checkpoint, it.dataset, on_plan=lambda _: None, on_rows=lambda _: None)
    reader = CacheReader.open(output)
    reread = None
    if images is Images.REFERENCE:
        reread = open_anchor_dataset(reader.manifest.dataset, it.checkpoint, root=None)
    kinds = (Kind.HIDDEN, Kind.ACTION)
    return AnchorSet(reader, batch_size=3, seed=0, kinds=kinds, images=reread)


@stacks
def test_nothing_is_lost_at_the_teachers_weights(
    family: Family, stack: str, opened: Any, tmp_path: Path
) -> None:
    it = opened(family)
    images = Images.REFERENCE if stack == it.adapter.default_stack else Images.EMBED
    student = copy.deepcopy(it.policy).train()
    term = Imitation(
        (Mode.HIDDEN, Mode.ACTION),
        anchors_of(it, tmp_path / "anchors.zarr", stack, images),
        student,
        it.adapter,
        loss=LossKind.NMSE,
    )
    for loss in term.losses(0).values():
        assert loss.total < 1e-8
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.05)
    for loss in term.losses(0).values():
        assert loss.total > 1e-6
