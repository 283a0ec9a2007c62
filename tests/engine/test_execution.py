"""Lower precision, loss scaling and recomputed layers give what full precision gives, nearly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from craftcli.config.train import TrainConfig
from craftcli.engine.retention.opening import open_terms
from craftcli.engine.retention.self_check import self_check
from craftcli.engine.retention.terms import evaluation_mode
from craftcli.engine.trainer import Trainer
from craftcli.sources import open_policy


def trainer_of(student: Any, data: Any, cache: Path, **settings: Any) -> Trainer:
    small = {"steps": 3, "batch_size": 4, "anchor_batch_size": 8, "device": "cpu"}
    config = TrainConfig(**{**small, **settings})
    return Trainer(config, student, data, open_terms(config, student, cache), output=Path("unused"))


def fresh() -> Any:
    return open_policy(TrainConfig(device="cpu"))


@pytest.mark.parametrize(("amp", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_follows_full_precision(
    new_data: Any, cache: Path, amp: str, dtype: torch.dtype
) -> None:
    whole = list(trainer_of(fresh(), new_data, cache, steps=12).steps())
    trainer = trainer_of(fresh(), new_data, cache, amp=amp, steps=12)
    low = list(trainer.steps())
    autocast: Any = trainer.execution.autocast()
    assert autocast.fast_dtype == dtype
    assert low[0].loss == pytest.approx(whole[0].loss, rel=0.1)
    assert low[0].loss != whole[0].loss
    # float16 first has to find a scale; from then on it learns too.
    skipped = [report.skipped for report in low]
    assert not any(skipped[-2:])
    assert amp == "fp16" or not any(skipped)
    assert low[-1].loss < 0.8 * low[0].loss


def test_the_self_check_allows_for_the_rounding_of_autocast(
    student: Any, new_data: Any, cache: Path
) -> None:
    trainer = trainer_of(student, new_data, cache, amp="bf16")
    assert trainer.retention is not None
    check = self_check(trainer.retention.terms, trainer.execution)
    assert check is not None
    assert 0 < check.drift <= check.tolerance == 1e-2


def test_a_loss_scale_changes_neither_figures_nor_weights(new_data: Any, cache: Path) -> None:
    """Powers of two scale floats exactly."""
    plain, scaled = fresh(), fresh()
    expected = list(trainer_of(plain, new_data, cache).steps())
    trainer = trainer_of(scaled, new_data, cache)
    trainer.execution.scaler = GradScaler("cpu", init_scale=2.0**12)
    for report, other in zip(trainer.steps(), expected, strict=True):
        assert not report.skipped
        assert report.retention is not None
        assert other.retention is not None
        assert report.retention.cos == pytest.approx(other.retention.cos, rel=1e-4, abs=1e-9)
        assert report.retention.dot == pytest.approx(other.retention.dot, rel=1e-4, abs=1e-12)
        assert report.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    for one, two in zip(plain.policy.parameters(), scaled.policy.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_a_scale_that_overflows_costs_steps_and_nothing_else(
    student: Any, new_data: Any, cache: Path
) -> None:
    trainer = trainer_of(student, new_data, cache, steps=6)
    before = [p.detach().clone() for p in student.policy.parameters()]
    trainer.execution.scaler = GradScaler("cpu", init_scale=2.0**120, backoff_factor=2.0**-36)
    reports = trainer.steps()
    assert next(reports).skipped
    assert all(torch.equal(p, q) for p, q in zip(student.policy.parameters(), before, strict=True))
    assert trainer.retention is not None
    assert trainer.retention.lam == 1.0
    rest = [report.skipped for report in reports]
    assert not rest[-1]
    assert trainer.execution.scale.item() < 2.0**60


def test_recomputed_layers_give_the_same_run(new_data: Any, cache: Path) -> None:
    runs = []
    for recompute in (False, True):
        student = fresh()
        if recompute:
            student.adapter.enable_gradient_checkpointing(student.policy)
        reports = list(trainer_of(student, new_data, cache).steps())
        figures = [(r.loss, r.retention and r.retention.loss) for r in reports]
        runs.append((figures, list(student.policy.parameters())))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(p, q) for p, q in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize("mode", ["hidden", "hidden+action"])
def test_anchors_are_recomputed_too(student: Any, new_data: Any, cache: Path, mode: str) -> None:
    """They run in evaluation mode, where the policy's own switch would be off."""
    student.adapter.enable_gradient_checkpointing(student.policy)
    student.policy.train()
    trainer = trainer_of(student, new_data, cache, mode=mode)
    retention = trainer.retention
    assert retention is not None
    layers = student.policy.model.paligemma_with_expert.paligemma.model.language_model.layers
    calls: list[int] = []
    handle = layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    losses = retention.losses(0)
    assert "+".join(losses) == mode
    assert len(calls) == 1
    torch.stack([loss.total for loss in losses.values()]).sum().backward()
    handle.remove()
    assert len(calls) == 2


def test_dropout_stays_off_while_layers_recompute(student: Any) -> None:
    student.adapter.enable_gradient_checkpointing(student.policy)
    student.policy.train()
    with evaluation_mode(student.policy):
        on = [m for m in student.policy.modules() if m.training]
        assert on
        assert not any(isinstance(m, torch.nn.Dropout) for m in on)
        assert not any(type(m).__name__.endswith("Attention") for m in on)
    assert all(module.training for module in student.policy.modules())
