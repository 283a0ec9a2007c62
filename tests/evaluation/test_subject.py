"""The plan of an evaluation: what a run used, and what of it no longer exists."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny.act

from craftcli.cache.reading.reader import CacheReader
from craftcli.config.train import TrainConfig
from craftcli.evaluation.evaluate import Amounts, evaluate_policy
from craftcli.evaluation.subject import Plan, Subject, open_subject
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.sources import DataSource, dataset_sources


@contextlib.contextmanager
def progress(total: int, unit: str, name: str) -> Iterator[Any]:
    yield lambda count: None


@pytest.fixture
def run(teacher: Any, cache: Path, tmp_path: Path) -> Subject:
    return Subject(checkpoint=teacher, run=tmp_path, config=TrainConfig(cache=cache))


def without(run: Subject, **settings: Any) -> Subject:
    assert run.config is not None
    return dataclasses.replace(run, config=dataclasses.replace(run.config, **settings))


def test_a_demo_run_knows_its_anchors_data_and_world(run: Subject, cache: Path) -> None:
    plan = run.plan()
    assert plan.cache is not None
    assert plan.cache.path == cache
    assert plan.datasets == dataset_sources("demo")
    assert [source.group for source in plan.datasets] == ["old", "new"]
    assert (plan.environments, plan.left_out) == (("demo",), ())


def test_any_run_knows_the_data_of_its_anchors_and_its_own(cache: Path, tmp_path: Path) -> None:
    act = load_checkpoint(str(tiny.act.make_state_only(tmp_path / "act")), device="cpu")
    config = TrainConfig(policy="act", dataset="me/new", dataset_root="/new", cache=cache)
    plan = Subject(checkpoint=act, run=tmp_path, config=config).plan()
    old, new = plan.datasets
    assert (old.repo_id, old.group) == ("craft-demo/old", "old")
    assert new == DataSource(repo_id="me/new", root="/new", group="new")
    assert plan.environments == ()


def test_a_cache_that_is_gone_is_said_to_be_left_out(run: Subject, tmp_path: Path) -> None:
    plan = without(run, cache=tmp_path / "gone.zarr").plan()
    assert plan.cache is None
    assert plan.left_out[0].startswith("drift: ")


@pytest.mark.parametrize(("mode", "shared"), [("none", 0), ("hidden", None)])
def test_drift_is_measured_though_the_runs_own_anchors_are_gone(
    run: Subject, cache: Path, tmp_path: Path, mode: str, shared: int | None
) -> None:
    orphan = without(run, cache=tmp_path / "gone.zarr", mode=mode)
    amounts = Amounts(batch_size=32)
    plan = Plan(cache=CacheReader.open(cache))
    found = evaluate_policy(orphan, plan, amounts, progress, anchor_root=None)
    assert found.drift is not None
    assert found.drift.shared_rows == shared
    assert any("held out" in reason for reason in found.left_out) == (shared is None)


def test_a_policy_that_no_run_made_knows_nothing(tmp_path: Path) -> None:
    subject = open_subject(str(tiny.act.make_state_only(tmp_path / "act")), device="cpu")
    assert (subject.run, subject.home, subject.identity.step) == (None, None, None)
    assert subject.plan() == Plan()
