"""A real policy with fewer action tokens than slots: empty ones are not stored, nothing is lost."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made.files import tree
from tiny.pi0_fast import MAX_TOKENS, PI0_FAST

from craftcli.cache.build import build as build_module
from craftcli.cache.build.build import BuildPlan, build_cache
from craftcli.cache.format import OUTPUT_MASK, TOP_LOGPROBS, TOP_TOKENS
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.transfer.join import join_caches, plan_join
from craftcli.choices import ActionSource, Images, Kind, LossKind, Mode, Pooling, StoreDtype
from craftcli.config.cache import CacheConfig
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.engine.retention.imitation import Imitation
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset

STATES = ("hidden/vlm.0", "hidden/vlm.1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The policy and its data."""
    folder = tmp_path_factory.mktemp("tiny")
    policy = load_checkpoint(str(PI0_FAST.make(folder / "policy")), device="cpu")
    PI0_FAST.write_data(folder / "data")
    config = policy.policy.config
    return policy, open_dataset("tiny/data", root=str(folder / "data"), policy_config=config)


def build(
    tiny: tuple[Any, Any], output: Path, *, on_rows: Any = lambda _: None, **settings: Any
) -> BuildPlan:
    plans: list[BuildPlan] = []
    config = CacheConfig(
        output=output,
        **{"samples": 7, "batch_size": 2, "chunk_mib": 0.03} | settings,
        kind="hidden+action",
        actions=ActionSource.DATA,
        images=Images.EMBED,
        layers="0,1",
        device="cpu",
    )
    build_cache(config, *tiny, on_plan=plans.append, on_rows=on_rows)
    return plans[0]


@pytest.fixture(scope="module")
def packed(tiny: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> CacheReader:
    path = tmp_path_factory.mktemp("packed") / "a.zarr"
    build(tiny, path)
    return CacheReader.open(path)


def test_states_and_tokens_are_packed(packed: CacheReader) -> None:
    assert packed.manifest.packed == (*STATES, TOP_LOGPROBS, TOP_TOKENS)
    assert packed.manifest.chunk_count > 1
    assert packed.verify() == []
    mask = packed.read_all("hidden_mask")
    assert mask.any(axis=1).all()
    assert mask.mean() < 0.75
    assert mask.shape[1] == MAX_TOKENS


def test_padding_is_zeros(packed: CacheReader) -> None:
    for name in STATES:
        assert not packed.read_all(name)[~packed.read_all("hidden_mask")].any()
    for name in (TOP_LOGPROBS, TOP_TOKENS):
        assert not packed.read_all(name)[~packed.read_all(OUTPUT_MASK)].any()
        assert packed.read_all(name)[packed.read_all(OUTPUT_MASK)].any()


def test_rows_are_those_of_a_cache_that_is_not_packed(
    tiny: tuple[Any, Any], packed: CacheReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "arrays_to_pack", lambda _: None)
    build(tiny, tmp_path / "whole.zarr")
    whole = CacheReader.open(tmp_path / "whole.zarr")
    assert (whole.manifest.packed, whole.manifest.format_version) == (None, "1.3")
    for name in whole.array_names():
        np.testing.assert_array_equal(whole.read_all(name), packed.read_all(name))
    assert whole.row_bytes() > packed.row_bytes()
    # Old and new caches are joined; each frame is there once.
    plan = plan_join([whole.path, packed.path])
    join_caches(plan, tmp_path / "joined.zarr", overwrite=False, on_rows=lambda _: None)
    joined = CacheReader.open(tmp_path / "joined.zarr")
    assert (joined.manifest.packed, joined.manifest.rows) == (packed.manifest.packed, 7)
    for name in joined.array_names():
        np.testing.assert_array_equal(joined.read_all(name), packed.read_all(name))


def test_a_resumed_build_ends_in_the_same_bytes(
    tiny: tuple[Any, Any], packed: CacheReader, tmp_path: Path
) -> None:
    seen: list[int] = []

    def interrupt(rows: int) -> None:
        seen.append(rows)
        if sum(seen) > 3:
            raise KeyboardInterrupt

    path = tmp_path / "a.zarr"
    with pytest.raises(KeyboardInterrupt):
        build(tiny, path, on_rows=interrupt)
    assert not path.exists()
    build(tiny, path, resume=True)
    assert tree(path) == tree(Path(str(packed.path)))


def test_nothing_is_lost_at_the_teachers_weights(
    tiny: tuple[Any, Any], packed: CacheReader
) -> None:
    teacher = tiny[0]
    student = copy.deepcopy(teacher.policy).train()
    anchors = AnchorSet(packed, batch_size=4, seed=0, kinds=(Kind.HIDDEN, Kind.ACTION))
    modes = (Mode.HIDDEN, Mode.ACTION)
    term = Imitation(modes, anchors, student, teacher.adapter, loss=LossKind.NMSE)
    for loss in term.losses(0).values():
        assert loss.total < 1e-8
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.05)
    for loss in term.losses(0).values():
        assert loss.total > 1e-6
        loss.total.backward(retain_graph=True)
    gradients = [p.grad for p in student.parameters() if p.grad is not None]
    assert gradients
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_the_size_is_known_before_and_what_makes_it_smaller(
    tiny: tuple[Any, Any], packed: CacheReader, tmp_path: Path
) -> None:
    plan = build(tiny, tmp_path / "a.zarr")
    rows = sum(f.stat().st_size for f in (tmp_path / "a.zarr").rglob("c/**/*") if f.is_file())
    assert plan.size.total_bytes == pytest.approx(rows, rel=0.25)
    assert plan.size.row_bytes == pytest.approx(packed.row_bytes(), rel=0.25)
    assert list(plan.smaller) == [
        "--dtype bfloat16",
        "--pooling mean_action_tokens",
        "--layers -1",
        "--samples 3",
    ]
    options: dict[str, dict[str, Any]] = {
        "--dtype bfloat16": {"dtype": StoreDtype.BFLOAT16},
        "--pooling mean_action_tokens": {"pooling": Pooling.MEAN_ACTION_TOKENS},
        "--samples 3": {"samples": 3},
    }
    for number, (option, settings) in enumerate(options.items()):
        path = tmp_path / f"{number}.zarr"
        build(tiny, path, **settings)
        rows = sum(f.stat().st_size for f in path.rglob("c/**/*") if f.is_file())
        assert plan.smaller[option] == pytest.approx(rows, rel=0.3), option
