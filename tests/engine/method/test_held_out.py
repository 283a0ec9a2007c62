"""The loss on held-out anchors: λ sees it, and a gap to the trained ones is reported."""

import json

import pytest

from craftcli.choices import Schedule
from craftcli.engine.method.budget import Budget
from craftcli.engine.method.constraint import Constraint
from craftcli.engine.method.held_out import HeldOut
from craftcli.engine.method.multiplier import Multiplier


def constraint(epsilon: float = 0.02) -> Constraint:
    budget = Budget(schedule=Schedule.CONSTANT, start=epsilon, end=epsilon, total_steps=100)
    return Constraint(Multiplier(lr=1.0), budget)


def test_the_larger_loss_binds() -> None:
    held = HeldOut()
    assert held.binding(0.01) == 0.01
    held.observe(0.05)
    assert held.binding(0.01) == 0.05
    assert held.binding(0.08) == 0.08
    held.observe(0.0)
    assert held.binding(0.01) == 0.01


def test_lambda_rises_by_the_held_out_violation() -> None:
    """v = max(L_ret, L_held) / ε - 1 moves λ until the next measurement."""
    blind, seeing = constraint(), constraint()
    seeing.observe_held_out(0.04)
    for step in range(3):
        blind.update(0.0, step)
        seeing.update(0.0, step)
    assert blind.lam == pytest.approx(1 / (1 + 3))
    assert seeing.lam == pytest.approx(1 + 3 * 1)
    seeing.observe_held_out(0.0)
    seeing.update(0.0, 3)
    assert seeing.lam == pytest.approx(1 / (1 / 4 + 1))


def warnings(held: HeldOut, trained: float, held_out: float, turns: int) -> list[str]:
    found = []
    for _ in range(turns):
        held.observe(held_out)
        found += [held.compare(trained, 0.02)]
        assert held.compare(trained, 0.02) is None, "one measurement counts once"
    return [text for text in found if text]


@pytest.mark.parametrize(
    ("trained", "held_out"),
    [(0.02, 0.05), (0.001, 0.019), (0.05, 0.1), (0.0, 0.0)],
    ids=["close", "within the budget", "both violated", "at the teacher"],
)
def test_no_gap_no_warning(trained: float, held_out: float) -> None:
    assert warnings(HeldOut(), trained, held_out, 50) == []


def test_a_gap_is_reported_once_and_again_after_it_closed() -> None:
    held = HeldOut(window=4)
    assert warnings(held, 0.001, 0.1, 3) == []
    (text,) = warnings(held, 0.001, 0.1, 20)
    for part in ("L_held", "0.1", "0.001", "too few anchors", "--samples", "--augment"):
        assert part in text
    assert warnings(held, 0.1, 0.1, 10) == []
    assert len(warnings(held, 0.001, 0.1, 10)) == 1


def test_the_warning_comes_out_of_the_constraint() -> None:
    held = constraint()
    notes = []
    for step in range(12):
        held.observe_held_out(0.5)
        notes += held.update(0.001, step)
    (note,) = notes
    assert note.is_warning
    assert "too few anchors" in note.text


def test_state_comes_back_through_json() -> None:
    whole = constraint()
    for step in range(9):
        whole.observe_held_out(0.5)
        assert whole.update(0.001, step) == []
    resumed = constraint()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for held in (whole, resumed):
        held.observe_held_out(0.5)
    assert [n.text for n in whole.update(0.001, 9)] == [n.text for n in resumed.update(0.001, 9)]
    assert whole.state_dict() == resumed.state_dict()
    assert whole.lam == resumed.lam


def test_a_state_without_it_is_that_of_earlier_versions() -> None:
    plain = constraint()
    plain.update(0.1, 0)
    state = plain.state_dict()
    assert state.keys() == {"multiplier", "auto", "watch", "violated"}
    resumed = constraint()
    resumed.load_state_dict(state)
    assert resumed.binding(0.3) == 0.3
