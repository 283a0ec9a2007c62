"""Every mode holds what it says it holds: at the teacher's weights, and after drift."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from craftcli.choices import Mode
from craftcli.config.train import TrainConfig
from craftcli.engine.method.losses import token_cross_entropy, top_k_divergence
from craftcli.engine.method.multiplier import Multiplier
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.engine.retention.gradient_reach import find_reach
from craftcli.engine.retention.retention import Retention, open_retention
from craftcli.engine.retention.self_check import self_check
from craftcli.errors import CraftError
from craftcli.policies.lerobot.batches import read_rows


@pytest.fixture(scope="module")
def anchors(build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("modes") / "a.zarr", kind="hidden+action+token_ce")


def retention_of(student: Any, cache: Path, mode: str, **settings: Any) -> Retention:
    fixed = {"anchor_batch_size": 8, "steps": 10, "fisher_samples": 8}
    return open_retention(TrainConfig(mode=mode, **{**fixed, **settings}), student, cache)


def drift(policy: torch.nn.Module, size: float = 0.01) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(size * torch.randn_like(parameter))


def task_backward(student: Any, data: Any) -> None:
    student.policy.train()
    student.policy(student.preprocess(read_rows(data, [0, 50, 100])))[0].backward()


def total(retention: Retention, mode: Mode, number: int = 0) -> float:
    return retention.losses(number)[mode].total.item()


def test_the_teachers_outputs_are_held_at_its_weights(teacher: Any, anchors: Path) -> None:
    retention = retention_of(teacher, anchors, "hidden+action+token_ce")
    assert total(retention, Mode.ACTION) == pytest.approx(0, abs=1e-7)
    assert total(retention, Mode.HIDDEN) <= 1e-9
    check = self_check(retention.terms)
    assert check is not None
    assert check.passed


def test_drift_shows_in_every_mode(student: Any, anchors: Path) -> None:
    retention = retention_of(student, anchors, "hidden+action+token_ce+replay+l2sp+ewc")
    before = {mode: total(retention, mode) for mode in retention.modes}
    drift(student.policy, 0.05)
    after = {mode: total(retention, mode) for mode in retention.modes}
    assert set(retention.modes) == set(Mode) - {Mode.NONE}
    for mode in retention.modes:
        assert after[mode] > before[mode] + 1e-4, mode


def test_tokens_are_the_teachers_own(teacher: Any, anchors: Path) -> None:
    """What it would say word by word is also what it holds most likely given its own words."""
    retention = retention_of(teacher, anchors, "token_ce")
    term: Any = retention.terms[0]
    batch = term.anchors.batch(0, torch.device("cpu"))
    with torch.no_grad():
        output = term.features(batch).output
    labels = batch.outputs["outputs/labels"]
    kept = labels != -100
    assert kept.sum(1).min() >= 3
    assert torch.equal(output.values.argmax(-1)[kept], labels[kept])
    assert torch.equal(kept, output.mask)


def test_a_single_row_has_lerobots_own_loss(teacher: Any, anchors: Path) -> None:
    retention = retention_of(teacher, anchors, "token_ce", anchor_batch_size=1)
    term: Any = retention.terms[0]
    batch = term.anchors.batch(0, torch.device("cpu"))
    teacher.policy.eval()
    with torch.no_grad():
        own, _ = teacher.policy(dict(batch.inputs))
        assert total(retention, Mode.TOKEN_CE) == pytest.approx(own.item(), rel=1e-4)


def test_top_k_divergence_is_the_divergence_when_all_tokens_are_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(2, 3, 5, generator=generator) for _ in range(2))
    top = theirs.log_softmax(-1).sort(dim=-1, descending=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    expected = functional.kl_div(
        ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="none"
    )
    whole = top_k_divergence(ours, top.indices, top.values, mask)
    torch.testing.assert_close(whole, expected.sum(-1).mean())
    part = top_k_divergence(ours, top.indices[..., :2], top.values[..., :2], mask)
    assert 0 <= part <= whole


def test_token_losses_leave_out_what_is_masked() -> None:
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([[1, 2, -100, -100], [3, -100, -100, -100]])
    loss = token_cross_entropy(logits, labels)
    rows = [
        functional.cross_entropy(logits[i][labels[i] >= 0], labels[i][labels[i] >= 0])
        for i in (0, 1)
    ]
    torch.testing.assert_close(loss, torch.stack(rows).mean())
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad[labels == -100].any()


def test_replay_is_the_policys_own_loss_on_the_anchors_frames(
    student: Any, old_data: Any, anchors: Path
) -> None:
    retention = retention_of(student, anchors, "replay")
    assert isinstance(retention.anchors, AnchorSet)
    frames = retention.anchors.frames(3)
    student.policy.train()
    with torch.no_grad():
        own, _ = student.policy(student.preprocess(read_rows(old_data, frames)))
    assert total(retention, Mode.REPLAY, 3) == pytest.approx(own.item(), rel=1e-5)


def test_l2sp_pulls_back_along_the_distance(student: Any, anchors: Path) -> None:
    retention = retention_of(student, anchors, "l2sp")
    before = {n: p.detach().clone() for n, p in student.policy.named_parameters()}
    drift(student.policy)
    retention.losses(0)[Mode.L2SP].total.backward()
    for name, parameter in student.policy.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, parameter.detach() - before[name])


def test_ewc_weighs_by_squared_gradients_of_single_anchors(
    student: Any, old_data: Any, anchors: Path
) -> None:
    retention = retention_of(student, anchors, "ewc", fisher_samples=3)
    term: Any = retention.terms[0]
    assert isinstance(retention.anchors, AnchorSet)
    name, parameter = next(
        (n, p) for n, p in student.policy.named_parameters() if n.endswith("lm_head.weight")
    )
    squares = torch.zeros_like(parameter)
    student.policy.eval()
    for frame in retention.anchors.frames(0)[:3]:
        student.policy.zero_grad()
        student.policy(student.preprocess(read_rows(old_data, [frame])))[0].backward()
        squares += parameter.grad.square()
    found = term.importance[name]
    torch.testing.assert_close(found / found.sum(), squares / squares.sum(), rtol=1e-3, atol=1e-7)
    everything = torch.cat([value.flatten() for value in term.importance.values()])
    assert everything.mean().item() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("mode", ["action", "token_ce", "hidden+action"])
def test_a_cache_of_the_wrong_kind_names_the_command(
    teacher: Any, build: Callable[..., Path], tmp_path: Path, mode: str
) -> None:
    states = build(tmp_path / "a.zarr", kind="hidden", samples=8)
    wanted = "hidden+" + mode.removeprefix("hidden+")
    with pytest.raises(CraftError) as caught:
        retention_of(teacher, states, mode)
    assert f"craft cache build --kind {wanted} --output {states}" in caught.value.fix
    less = "hold less with --mode hidden, or "
    assert caught.value.fix.startswith(less) == mode.startswith("hidden")


def test_each_mode_under_its_own_multiplier(student: Any, new_data: Any, anchors: Path) -> None:
    settings = {"constraints": "each", "epsilon_start": 0.01, "lambda_lr": 0.5}
    retention = retention_of(student, anchors, "hidden+action", **settings)
    drift(student.policy)
    task_backward(student, new_data)
    report = retention.apply(0)
    assert report is not None
    assert report.lams == {"hidden": 1.0, "action": 1.0}
    saved = retention.state_dict()
    moved = {m: Multiplier(lr=0.5).step(report.losses[m], 0.01) for m in ("hidden", "action")}
    assert moved["action"] < 1.0 < moved["hidden"]
    for mode, value in moved.items():
        assert saved[mode]["multiplier"]["value"] == pytest.approx(value)
    assert retention.lam == pytest.approx(sum(moved.values()))


def test_one_constraint_holds_the_mean(student: Any, new_data: Any, anchors: Path) -> None:
    retention = retention_of(student, anchors, "hidden+action")
    drift(student.policy)
    task_backward(student, new_data)
    report = retention.apply(0)
    assert report is not None
    assert report.loss == pytest.approx((report.losses["hidden"] + report.losses["action"]) / 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"surgery": "per_layer"},
        {"surgery": "per_group"},
        {"surgery": "none"},
        {"merge": "upgrad"},
        {"project_when": "conflict"},
    ],
    ids=str,
)
def test_every_way_of_merging_leaves_finite_gradients(
    student: Any, new_data: Any, anchors: Path, settings: dict[str, str]
) -> None:
    retention = retention_of(student, anchors, "hidden", **settings)
    retention.group_by(torch.optim.SGD(student.policy.parameters(), lr=0.1))
    drift(student.policy)
    task_backward(student, new_data)
    report = retention.apply(0)
    assert report is not None
    assert report.finite
    assert report.gradients is not None
    assert 0 <= report.gradients.conflict_share <= 1
    assert all(p.grad is None or p.grad.isfinite().all() for p in student.policy.parameters())


def test_only_a_violated_budget_projects(student: Any, new_data: Any, anchors: Path) -> None:
    seen = {}
    for epsilon in (0.0, 1e9):
        retention = retention_of(
            student,
            anchors,
            "hidden",
            epsilon_start=epsilon,
            conflict_threshold=1.0,
        )
        drift(student.policy)
        task_backward(student, new_data)
        report = retention.apply(0)
        assert report is not None
        assert report.gradients is not None
        assert report.gradients.conflict
        seen[epsilon] = report.projected
    assert seen == {0.0: True, 1e9: False}


def test_a_merge_that_resolves_conflicts_itself_projects_nothing(
    student: Any, new_data: Any, anchors: Path
) -> None:
    settings = {"epsilon_start": 0.0, "conflict_threshold": 1.0, "merge": "upgrad"}
    retention = retention_of(student, anchors, "hidden", **settings)
    drift(student.policy)
    task_backward(student, new_data)
    report = retention.apply(0)
    assert report is not None
    assert report.gradients is not None
    assert report.gradients.conflict
    assert not report.projected


def test_a_budget_is_found_in_the_first_turns_and_reported(
    student: Any, new_data: Any, anchors: Path
) -> None:
    retention = retention_of(student, anchors, "token_ce", lambda_lr=1.0)
    notes: list[str] = []
    for step in range(22):
        drift(student.policy, 0.002)
        student.policy.zero_grad()
        task_backward(student, new_data)
        report = retention.apply(step)
        assert report is not None
        notes += [note.text for note in report.notes]
        if step < 20:
            assert retention.lam == 1.0
    assert len(notes) == 1
    assert notes[0].startswith("ε = ")
    assert retention.lam != 1.0
    other = retention_of(student, anchors, "token_ce")
    other.load_state_dict(retention.state_dict())
    assert other.epsilon(22) == retention.epsilon(22)


HIDDEN_AND_MORE = ("hidden+action", "hidden+token_ce", "hidden+replay", "hidden+l2sp")


@pytest.mark.parametrize("mode", ["action", "replay", "l2sp", *HIDDEN_AND_MORE])
def test_what_holds_outputs_or_weights_leaves_nothing_free(
    student: Any, new_data: Any, anchors: Path, mode: str
) -> None:
    retention = retention_of(student, anchors, mode)
    batch = student.preprocess(read_rows(new_data, [0, 1]))
    reach = find_reach(student.policy, student.adapter, retention.terms, batch)
    assert reach.free == frozenset()
    assert len(reach.downstream) == (2 if mode in HIDDEN_AND_MORE else 0)
    assert reach.retained == reach.trainable
