"""A live teacher: new anchors at every step, the answers a cache would hold, and no cache."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny.act import ACT, STATE_ONLY
from tiny.diffusion import DIFFUSION
from tiny.family import Family
from tiny.processes import together
from tiny.smolvla import SMOLVLA
from tiny.world import write_dataset

from craftcli.cache.build.build import build_cache
from craftcli.cache.build.row_sources import row_seed
from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Kind, LossKind, Mode, Teacher
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.retention.imitation import Imitation
from craftcli.engine.retention.live_anchors import LIVE_FILE, LiveAnchors
from craftcli.engine.retention.live_teacher import open_live_teacher
from craftcli.engine.retention.opening import open_anchors
from craftcli.engine.run import OpenedRun, open_run, prepare
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import PolicyAdapter
from craftcli.sources import open_policy

LORA = "r=2,targets=linear1;linear2"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of the new task."""
    return write_dataset(tmp_path_factory.mktemp("data") / "new")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of the old task."""
    return write_dataset(tmp_path_factory.mktemp("data") / "old", seed=7)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that reads states alone: its anchors come from statistics."""
    return STATE_ONLY.make(tmp_path_factory.mktemp("states") / "policy")


def settings(policy: Path, data: Path, output: Path, **changed: Any) -> TrainConfig:
    small: dict[str, Any] = {"steps": 4, "batch_size": 4, "anchor_batch_size": 4, "lr": 1e-3}
    small |= {"device": "cpu", "teacher": Teacher.LIVE, "seed": 3, "log_every": 1, "save_every": 2}
    return TrainConfig(**{**small, **changed}, policy=str(policy), dataset=str(data), output=output)


def opened(config: TrainConfig) -> tuple[OpenedRun, LiveAnchors]:
    run = open_run(config, {}, Processes())
    assert run.terms is not None
    assert isinstance(run.terms.anchors, LiveAnchors)
    return run, run.terms.anchors


def train(config: TrainConfig) -> list[Any]:
    """What every step of a run saw of retention."""
    run = open_run(config, {}, Processes.from_environment())
    trainer = run.trainer()
    seen: list[Any] = []

    def keep(_: int) -> None:
        report = trainer.last_report
        assert report is not None
        assert report.retention is not None
        seen.append((report.loss, report.retention.loss, report.retention.lam))

    trainer.run(keep, lambda _: None, lambda _: None)
    return seen


def shake(run: OpenedRun) -> None:
    """Move everything that is trained away from the teacher."""
    torch.manual_seed(0)
    for parameter in run.student.policy.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn_like(parameter)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert torch.equal(values, other[name]), name


@pytest.mark.parametrize("family", [STATE_ONLY, DIFFUSION, SMOLVLA], ids=lambda f: f.name)
def test_the_loss_is_zero_at_the_teachers_weights(
    family: Family, new: Path, old: Path, tmp_path: Path
) -> None:
    sources: dict[str, Any] = {}
    if family is SMOLVLA:
        (tmp_path / "old.txt").write_text("open the drawer\nclose the drawer\n")
        sources = {"old_tasks": str(tmp_path / "old.txt")}
    elif family is not STATE_ONLY:
        sources = {"old_dataset": str(old), "anchor_samples": 32}
    policy = family.make(tmp_path / "policy")
    run, _ = opened(settings(policy, new, tmp_path / "run", **sources))
    assert run.terms is not None
    prepared = prepare(run, run.terms)
    assert prepared.check is not None
    assert prepared.check.drift < 1e-12
    assert not list(tmp_path.rglob("*.zarr"))
    shake(run)
    assert all(loss.total > 1e-5 for loss in run.terms.losses(1).values())


def test_tokens_of_the_demo(tmp_path: Path) -> None:
    config = TrainConfig(
        teacher=Teacher.LIVE,
        mode="hidden+action+token_ce",
        anchor_batch_size=2,
        anchor_samples=4,
        device="cpu",
        output=tmp_path / "run",
    )
    run, anchors = opened(config)
    assert run.terms is not None
    losses = run.terms.losses(0)
    assert losses[Mode.HIDDEN].total == 0
    assert losses[Mode.ACTION].total.item() == pytest.approx(0, abs=1e-6)
    assert losses[Mode.TOKEN_CE].total > 0
    # The instructions are those that the new data does not have.
    assert {task for _, task in anchors.instructions()} <= {
        f"reach the {colour} block" for colour in ("red", "green", "yellow")
    }
    assert run.opposing_anchors(anchors) == 0


def test_every_number_is_a_batch_of_its_own(states: Path, new: Path, tmp_path: Path) -> None:
    _, anchors = opened(settings(states, new, tmp_path / "run"))
    _, again = opened(settings(states, new, tmp_path / "again"))
    _, other = opened(settings(states, new, tmp_path / "other", seed=4))
    first = anchors.batch(5, CPU)
    assert_same(first.inputs, again.batch(5, CPU).inputs)
    assert_same(first.targets, again.batch(5, CPU).targets)
    rows = [
        tuple(row)
        for n in range(8)
        for row in anchors.batch(n, CPU).inputs["observation.state"].tolist()
    ]
    assert len(set(rows)) == 8 * 4
    assert not torch.equal(
        first.inputs["observation.state"], other.batch(5, CPU).inputs["observation.state"]
    )


@pytest.mark.parametrize("family", [STATE_ONLY, ACT], ids=lambda f: f.name)
def test_a_cache_of_the_same_rows_gives_the_same_loss(
    family: Family, new: Path, old: Path, tmp_path: Path
) -> None:
    policy = family.make(tmp_path / "policy")
    few = {"old_dataset": str(old), "anchor_samples": 32, "mode": "hidden+action"}
    run, anchors = opened(settings(policy, new, tmp_path / "run", **few))
    seed = row_seed(3, 2)
    plan = anchors.plan
    teacher = open_policy(run.config)
    build_cache(
        replace(plan.config, seed=seed, output=tmp_path / "a.zarr"),
        teacher,
        plan.dataset,
        on_plan=lambda _: None,
        on_rows=lambda _: None,
        prompts=replace(plan.prompts, seed=seed),
    )
    shake(run)
    reader = CacheReader.open(tmp_path / "a.zarr")
    cached = open_anchors(reader, run.student, kinds=[Kind.HIDDEN, Kind.ACTION])
    rows = np.random.default_rng(seed).choice(reader.manifest.rows, 4, replace=False)
    theirs, ours = cached.anchors.read(rows, CPU), anchors.batch(2, CPU)
    assert ours.inputs.keys() == theirs.inputs.keys()
    for name, values in ours.inputs.items():
        torch.testing.assert_close(values, theirs.inputs[name], atol=3e-3, rtol=0)
    assert ours.outputs.keys() == theirs.outputs.keys()
    modes = (Mode.HIDDEN, Mode.ACTION)
    compare = Imitation(modes, anchors, run.student.policy, run.student.adapter, loss=LossKind.NMSE)
    # The variances are measured on other rows: about the same.
    for name, values in ours.variances.items():
        torch.testing.assert_close(values, theirs.variances[name], rtol=0.5, atol=0)
    theirs = replace(theirs, variances=ours.variances)
    both = [compare.compare(compare.features(b), b, LossKind.NMSE) for b in (ours, theirs)]
    for mode in modes:
        assert both[0][mode].total.item() > 1e-4
        assert both[0][mode].total.item() == pytest.approx(both[1][mode].total.item(), rel=1e-3)


def test_without_its_lora_weights_the_student_is_its_teacher(
    states: Path, new: Path, tmp_path: Path
) -> None:
    run, anchors = opened(settings(states, new, tmp_path / "run", lora=LORA))
    assert not anchors.teacher.copied
    assert anchors.teacher.copied_bytes == 0
    whole = replace(run.config, lora=None)
    copy = open_live_teacher(whole, open_policy(whole))
    assert copy.copied_bytes > 0
    apart = LiveAnchors(anchors.plan, copy, kinds=[Kind.HIDDEN, Kind.ACTION], batch_size=4, seed=3)
    shake(run)
    policy = run.student.policy
    frozen, trained = [p for n, p in policy.named_parameters() if "lora_" in n][:2]
    frozen.requires_grad_(False)
    before = {n: p.clone() for n, p in policy.named_parameters()}
    flags = {n: p.requires_grad for n, p in policy.named_parameters()}
    policy.train()
    assert run.terms is not None
    moved = run.terms.losses(0)[Mode.HIDDEN].total
    assert_same(anchors.batch(1, CPU).targets, apart.batch(1, CPU).targets)
    assert_same(anchors.batch(1, CPU).outputs, apart.batch(1, CPU).outputs)
    assert anchors.variances == apart.variances
    # Everything is as it was: the weights, what is trained, the mode, and the LoRA weights' effect.
    assert_same(dict(policy.named_parameters()), before)
    assert {n: p.requires_grad for n, p in policy.named_parameters()} == flags
    assert trained.requires_grad
    assert policy.training
    assert moved > 1e-5
    assert torch.equal(run.terms.losses(0)[Mode.HIDDEN].total, moved)


def test_lora_weights_that_were_there_belong_to_the_teacher(
    states: Path, new: Path, tmp_path: Path
) -> None:
    train(settings(states, new, tmp_path / "first", lora=LORA, steps=2))
    run, anchors = opened(settings(tmp_path / "first", new, tmp_path / "second"))
    assert anchors.teacher.copied
    assert run.terms is not None
    assert prepare(run, run.terms).check is not None


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_resumed_run_ends_as_an_undisturbed_one(
    states: Path, new: Path, tmp_path: Path, lora: str | None
) -> None:
    whole = train(settings(states, new, tmp_path / "run", lora=lora))
    assert whole[-1][1] > 0
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "run", half, symlinks=True)
    shutil.rmtree(half / "checkpoints/000004")
    (half / "checkpoints/last").unlink()
    (half / "checkpoints/last").symlink_to("000002")
    assert train(TrainConfig(resume=half)) == whole[2:]
    (file,) = (half / "checkpoints/last/pretrained_model").glob("*model.safetensors")
    assert_same(load_file(file), load_file(Path(str(file).replace("half", "run"))))


def test_a_run_is_not_resumed_with_another_teacher(states: Path, new: Path, tmp_path: Path) -> None:
    policy = shutil.copytree(states, tmp_path / "policy")
    train(settings(policy, new, tmp_path / "run", steps=2))
    shutil.copy(
        tmp_path / "run/checkpoints/last/pretrained_model/model.safetensors",
        policy / "model.safetensors",
    )
    with pytest.raises(CraftError, match="weights_digest changed") as error:
        open_run(TrainConfig(resume=tmp_path / "run"), {}, Processes())
    assert "put back the policy" in error.value.fix
    (tmp_path / "run" / LIVE_FILE).write_text("{")
    with pytest.raises(CraftError, match=r"live_teacher\.json has changed"):
        open_run(TrainConfig(resume=tmp_path / "run"), {}, Processes())
    with pytest.raises(CraftError, match="its live teacher is unknown"):
        open_run(TrainConfig(resume=tmp_path / "run", accept_changes=True), {}, Processes())


def test_two_processes_draw_different_anchors_and_move_together(
    states: Path, new: Path, tmp_path: Path
) -> None:
    config = settings(states, new, tmp_path / "run", steps=3)

    def work() -> None:
        processes = Processes.from_environment()
        with processes.connected():
            seen = train(config)
            (tmp_path / f"seen-{os.environ['RANK']}").write_text(json.dumps(seen))

    together(work)
    first, second = (json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in (0, 1))
    assert first == second  # to the last bit, λ with them
    assert first[-1][1] > 0
    alone = train(settings(states, new, tmp_path / "alone", steps=3))
    assert alone[-1][1] != first[-1][1]


def test_rows_on_which_the_teacher_is_not_finite_are_left_out(
    states: Path, new: Path, old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"old_dataset": str(old), "anchor_samples": 16}
    run, clean = opened(settings(states, new, tmp_path / "run", **few))
    state = clean.batch(0, CPU).inputs["observation.state"]
    adapter: type[PolicyAdapter] = type(run.student.adapter)
    features = adapter.features

    def spoiled(own: Any, policy: Any, batch: Any, request: Any) -> Any:
        found = features(own, policy, batch, request)
        bad = (batch["observation.state"] == state[1]).all(1)
        for values in found.hidden.values():
            values[bad] = torch.nan
        return found

    monkeypatch.setattr(adapter, "features", spoiled)
    _, anchors = opened(settings(states, new, tmp_path / "again", **few))
    assert anchors.invalid == 1
    batch = anchors.batch(0, CPU)
    assert torch.equal(batch.inputs["observation.state"], state[[0, 2, 3]])
    assert len(batch.targets[next(iter(batch.targets))]) == 3
    monkeypatch.setattr(adapter, "features", lambda *a: spoil_all(features(*a)))
    with pytest.raises(CraftError, match="The teacher's outputs are not finite"):
        opened(settings(states, new, tmp_path / "third", **few))


def spoil_all(found: Any) -> Any:
    for values in found.hidden.values():
        values[:] = torch.nan
    return found


def test_fewer_anchors_than_a_batch(states: Path, new: Path, tmp_path: Path) -> None:
    with pytest.raises(CraftError, match="fewer than a batch") as error:
        opened(settings(states, new, tmp_path / "run", anchor_samples=2))
    assert "--anchor-batch-size 2" in error.value.fix
    assert error.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"mode": "replay"}, "does not work with --mode replay, which needs the labels"),
        ({"mode": "hidden+ewc"}, "does not work with --mode ewc"),
        ({"parallel": "fsdp"}, "does not work with --parallel fsdp"),
        ({"anchors": "cache"}, "needs --anchors auto"),
        ({"held_out_share": 0.1}, "--held-out-share has no effect with --teacher live"),
        ({"other_student": True}, "--other-student cannot be combined with --teacher live"),
    ],
)
def test_settings_that_do_not_go_together(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(CraftError, match=problem):
        TrainConfig(teacher=Teacher.LIVE, **changed)


class TestCommands:
    def test_train_dryrun_and_eval(
        self, craft: Callable[..., Any], states: Path, new: Path, tmp_path: Path
    ) -> None:
        options = ("--policy", states, "--dataset", new, "--teacher", "live", "--device", "cpu")
        sizes = ("--steps", 2, "--batch-size", 4, "--anchor-batch-size", 4)
        rehearsed = craft("dryrun", *options, *sizes, "--json")
        assert rehearsed.exit_code == 0, rehearsed.output
        found = json.loads(rehearsed.stdout)
        assert found["anchors"]["teacher"] == "live"
        detail = " ".join(check["detail"] for check in found["checks"])
        assert "no cache: 4096 states drawn from the statistics" in detail
        assert "one more forward pass of 4 anchors a retention step and a copy" in detail
        trained = craft("train", *options, *sizes, "-o", "runs/one")
        assert trained.exit_code == 0, trained.output
        said = " ".join(trained.stdout.split())
        assert "The teacher answers live, to new anchors at every step. It costs one more" in said
        assert "(0 to rounding)" in said
        assert not list(tmp_path.rglob("*.zarr"))
        evaluated = craft("eval", "runs/one", "--samples", 4, "--device", "cpu", "--json")
        assert evaluated.exit_code == 0, evaluated.output
        assert json.loads(evaluated.stdout)["left_out"] == [
            "drift: the run asked its teacher and has no cache. Give one with --cache."
        ]

    def test_a_cache_and_a_live_teacher_contradict_each_other(
        self, craft: Callable[..., Any]
    ) -> None:
        refused = craft("train", "--teacher", "live", "--cache", "a.zarr", "--device", "cpu")
        assert refused.exit_code == EXIT_USAGE
        assert "--cache a.zarr holds the anchors, and --teacher live would make others" in (
            " ".join(refused.stderr.split())
        )
