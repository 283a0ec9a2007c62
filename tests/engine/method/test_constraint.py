"""Budget and multiplier together; pitfall 20: a stuck λ is reported, with what to change."""

import json

import pytest

from craftcli.choices import Schedule
from craftcli.engine.method.budget import Budget
from craftcli.engine.method.constraint import Constraint, LambdaWatch
from craftcli.engine.method.multiplier import Multiplier


def feed(
    watch: LambdaWatch, turns: int, *, lam: float, violated: bool, far: bool = False
) -> list[str]:
    warnings = [
        watch.observe(lam, at_maximum=lam == 10.0, at_zero=lam == 0.0, violated=violated, far=far)
        for _ in range(turns)
    ]
    return [warning for warning in warnings if warning]


def test_a_maximum_that_does_not_help_is_reported_once() -> None:
    watch = LambdaWatch()
    assert feed(watch, 99, lam=10.0, violated=True) == []
    (warning,) = feed(watch, 500, lam=10.0, violated=True)
    for part in ("maximum of 10", "100 retention turns", "--epsilon-start", "--lambda-max", "--lr"):
        assert part in warning


def test_a_budget_that_never_binds_is_reported_once() -> None:
    watch = LambdaWatch(patience=5)
    assert feed(watch, 4, lam=0.0, violated=False) == []
    (warning,) = feed(watch, 50, lam=0.0, violated=False)
    assert "does not bind" in warning
    assert "Lower --epsilon-start" in warning


def test_a_loss_far_above_its_budget_is_reported_while_λ_is_held_elsewhere() -> None:
    watch = LambdaWatch(patience=5)
    assert feed(watch, 4, lam=1.4, violated=True, far=True) == []
    (warning,) = feed(watch, 50, lam=1.4, violated=True, far=True)
    for part in ("more than 30 times ε", "λ at 1.4", "Lower --lr", "--anchor-batch-size"):
        assert part in warning


@pytest.mark.parametrize(("loss", "warnings"), [(0.61, 1), (0.59, 0)])
def test_far_is_thirty_times_the_budget(loss: float, warnings: int) -> None:
    budget = Budget(schedule=Schedule.CONSTANT, start=0.02, end=0.02, total_steps=200)
    constraint = Constraint(Multiplier(), budget)
    # The size of the gradients holds λ at 1.
    notes = [
        note
        for step in range(150)
        for note in constraint.update(loss, step, gradient_ratio=0.1)
        if note.is_warning
    ]
    assert len(notes) == warnings


def test_again_only_after_it_left_and_returned() -> None:
    watch = LambdaWatch(patience=5)
    assert len(feed(watch, 20, lam=10.0, violated=True)) == 1
    assert feed(watch, 1, lam=9.9, violated=True) == []
    assert feed(watch, 4, lam=10.0, violated=True) == []
    assert len(feed(watch, 20, lam=10.0, violated=True)) == 1
    assert len(feed(watch, 20, lam=0.0, violated=False)) == 1


@pytest.mark.parametrize(("lam", "violated"), [(10.0, False), (0.0, True), (5.0, True)])
def test_a_λ_that_its_settings_hold_is_no_warning(lam: float, violated: bool) -> None:
    assert feed(LambdaWatch(patience=2), 10, lam=lam, violated=violated) == []


def test_resumes_through_json() -> None:
    first, resumed = LambdaWatch(patience=5), LambdaWatch(patience=5)
    feed(first, 3, lam=10.0, violated=True)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert repr(resumed) == "LambdaWatch(end=maximum, turns=3, patience=5)"
    assert len(feed(resumed, 2, lam=10.0, violated=True)) == 1


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="patience"):
        LambdaWatch(patience=0)


def test_a_cosine_may_begin_a_rounding_error_below_zero() -> None:
    constraint = Constraint(Multiplier(), Budget(schedule=Schedule.AUTO))
    rise = [0.1 + 0.2 * turn / 19 for turn in range(20)]
    notes = [
        note for step, loss in enumerate([-1.7e-8, *rise]) for note in constraint.update(loss, step)
    ]
    (note,) = notes
    assert "L_ret was 0 at the teacher's weights" in note.text
    assert not note.is_warning
    assert 0.05 < constraint.epsilon(99) < 0.15


def test_a_constraint_resumes_with_its_budget_and_multiplier() -> None:
    def make() -> Constraint:
        return Constraint(Multiplier(value=0.0), Budget(schedule=Schedule.AUTO), warmup_turns=4)

    first, resumed = make(), make()
    for step in range(25):
        first.update(0.1 * step, step)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.epsilon(30) == first.epsilon(30)
    assert resumed.lam == first.lam > 0
    assert resumed.weight(1) == first.lam / 2
