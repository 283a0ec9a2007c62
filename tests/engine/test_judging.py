"""The verdict on a run: its figures, its causes, and what it advises."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from made.manifests import make_manifest

from craftcli.cache.format import MadeRows
from craftcli.config.train import TrainConfig
from craftcli.engine.budget_record import BudgetRecord
from craftcli.engine.judging import AnchorCount, judge
from craftcli.engine.metrics import RetentionReport, StepReport
from craftcli.engine.verdict import Outcome, Verdict


def step(number: int, used: float | None, *, skipped: bool = False, **changed: Any) -> StepReport:
    """A step with a retention turn at this L_ret / ε."""
    epsilon = 0.02 if used is not None else 0.0
    values: dict[str, Any] = {
        "loss": 0.0 if used is None else used * epsilon,
        "lam": 1.0,
        "epsilon": epsilon,
        "violated": used is None or used > 1,
        "budget_used": used,
    }
    turn = RetentionReport(**{**values, "gradients": None, "losses": {}, "lams": {}, **changed})
    return StepReport(
        step=number,
        loss=1.0,
        grad_norm=1.0,
        lr=1e-3,
        update_s=0.1,
        data_s=0.1,
        retention=turn,
        skipped=skipped,
    )


def recorded(used: Sequence[float | None], **changed: Any) -> BudgetRecord:
    record = BudgetRecord()
    for number, one in enumerate(used, start=1):
        record.add(step(number, one, **changed))
    return record


def rising(used: float, turns: int = 30) -> BudgetRecord:
    """A record whose λ rises by 0.1 a turn."""
    record = BudgetRecord()
    for number in range(turns):
        record.add(step(number + 1, used, lam=1 + 0.1 * number))
    return record


ENOUGH = AnchorCount(rows=512, frames=512, reaching=False)


def verdict(
    record: BudgetRecord,
    *,
    skipped: int = 0,
    free_share: float = 0.0,
    anchors: AnchorCount | None = ENOUGH,
    **settings: Any,
) -> Verdict:
    config = TrainConfig(**settings)
    return judge(record, config, step=30, skipped=skipped, free_share=free_share, anchors=anchors)


def test_a_kept_budget_is_one_line_that_points_to_closed_loop() -> None:
    found = verdict(recorded([3.0] * 3 + [0.4] * 27))
    assert found.outcome is Outcome.WITHIN
    assert found.text == (
        "L_ret ended at 0.4 x ε and was above it in 10 % of the steps: within its budget. craft "
        "eval shows whether the old skill is kept."
    )
    assert not found.needs_action
    assert found.above_share == pytest.approx(0.1)


def test_a_budget_that_was_missed_says_what_to_change() -> None:
    found = verdict(rising(2.9))
    assert found.outcome is Outcome.EXCEEDED
    assert found.needs_action
    assert found.text == (
        "L_ret ended at 2.9 x ε and was above it in 100 % of the steps: the old skill is probably "
        "not kept. λ is still rising (3.9 of 10): raise --lambda-lr or --steps."
    )


@pytest.mark.parametrize(
    ("record", "settings", "advice"),
    [
        (
            recorded([3.0] * 30, lam=10.0, at_maximum=True),
            {},
            "λ is at its maximum of 10: raise --lambda-max or lower --lr.",
        ),
        (
            recorded([3.0] * 30, lam=0.93, bounded=True),
            {},
            "λ stays at 0.93, because the gradient of the anchors outweighs the task's, and that "
            "of few anchors is mostly noise: raise --anchor-batch-size (now 2), take more --steps "
            "or lower --lr.",
        ),
        (
            recorded([3.0] * 30),
            {"lambda_lr": 0.0},
            "--lambda-lr 0 holds λ at 1: leave it out, or raise --lambda-init.",
        ),
        (
            recorded([3.0] * 30),
            {"merge": "equal"},
            "--merge equal limits the weight of retention: use --merge weighted.",
        ),
        (
            rising(3.0),
            {"retention_every": 5},
            "λ is still rising (3.9 of 10): raise --lambda-lr or --steps, or hold more often with "
            "--retention-every 1.",
        ),
        (recorded([3.0] * 30), {}, "Take more --steps or lower --lr."),
        (
            recorded([0.5] * 30, held_out=0.06),
            {},
            "Use more anchors: --anchor-samples, or craft cache build --samples.",
        ),
    ],
    ids=["maximum", "bounded", "fixed", "merge", "every", "level", "held out"],
)
def test_the_advice_fits_the_cause(
    record: BudgetRecord, settings: dict[str, Any], advice: str
) -> None:
    found = verdict(record, **settings)
    assert found.outcome is Outcome.EXCEEDED
    assert found.advice == advice


def test_a_budget_just_missed_is_no_lost_skill() -> None:
    text = verdict(recorded([1.2] * 30)).text
    assert "over its budget. craft eval shows" in text
    assert "probably not kept" not in text


def test_a_few_frames_say_little_even_within_the_budget() -> None:
    few = AnchorCount(rows=16, frames=16, reaching=False)
    found = verdict(recorded([0.4] * 30), anchors=few)
    assert found.outcome is Outcome.FEW_ANCHORS
    assert found.needs_action
    assert found.anchors == 16
    assert "within its budget, but on 16 frames, which a policy learns by heart" in found.text
    assert "--augment" in (found.advice or "")
    # Frames that were not trained on, or variations, tell more.
    assert verdict(recorded([0.4] * 30, held_out=0.01), anchors=few).outcome is Outcome.WITHIN
    varied = AnchorCount(rows=1024, frames=16, reaching=True)
    assert verdict(recorded([0.4] * 30), anchors=varied).outcome is Outcome.WITHIN
    # Weights alone have no anchors.
    assert verdict(recorded([0.4] * 30), anchors=None).outcome is Outcome.WITHIN


def test_anchors_that_reach_further_may_drift_further() -> None:
    drawn = AnchorCount(rows=4096, frames=0, reaching=True)
    near = verdict(recorded([3.0] * 30), anchors=drawn)
    assert near.outcome is Outcome.EXCEEDED
    assert (
        "over its budget. The anchors were made and reach further than the old data." in near.text
    )
    assert "probably not kept" not in near.text
    assert "probably not kept" in verdict(recorded([6.0] * 30), anchors=drawn).text


@pytest.mark.parametrize(
    ("made", "frames", "reaching"),
    [
        (None, 8, False),
        (MadeRows(source="augment", rows=6), 2, True),
        (MadeRows(source="draws", rows=6), 2, False),
        (MadeRows(source="draws+augment", rows=6), 2, True),
        (MadeRows(source="statistics", rows=8), 0, True),
    ],
)
def test_frames_are_counted_without_what_was_made(
    made: MadeRows | None, frames: int, reaching: bool
) -> None:
    counted = AnchorCount.of(make_manifest(rows=8, made=made))
    assert (counted.rows, counted.frames, counted.reaching) == (8, frames, reaching)


def test_what_nothing_holds_is_named_even_within_the_budget() -> None:
    found = verdict(recorded([0.5] * 30), mode="hidden", free_share=0.08)
    assert found.outcome is Outcome.PART_FREE
    assert found.needs_action
    assert "8 % of the trained weights lie behind what is held and are free" in found.text
    assert found.advice == "Use --freeze-downstream or --mode hidden+action."
    both = verdict(rising(3.0), mode="hidden", free_share=0.08)
    assert both.advice is not None
    assert "--lambda-lr" in both.advice
    assert "--freeze-downstream" in both.advice


def test_plain_fine_tuning_holds_nothing() -> None:
    found = verdict(BudgetRecord(), mode="none")
    assert found.outcome is Outcome.NOTHING_HELD
    assert found.text == "Nothing was held (--mode none): the old skill may be lost."


def test_without_a_budget_there_is_no_verdict() -> None:
    zero = verdict(recorded([None] * 30), mode="l2sp", epsilon_start=0.0)
    assert zero.outcome is Outcome.UNKNOWN
    assert "ε is 0" in zero.text
    assert "no ε was found" in verdict(recorded([None] * 30), loss="cosine").text
    assert verdict(recorded([9.0] * 9)).text == "Too few retention steps to judge the budget: 9."


def test_a_large_violation_is_a_number_that_people_read() -> None:
    assert "L_ret ended at 6,543 x ε" in verdict(recorded([6543.2] * 30)).text


def test_the_end_counts_and_not_the_way_there() -> None:
    assert recorded([9.0] * 24 + [0.5] * 6).used == 0.5
    assert recorded([9.0] * 900 + [3.0] * 10 + [1.0] * 10).used == 2.0


def test_skipped_steps_do_not_count_and_are_named_when_many() -> None:
    record = recorded([0.5] * 20)
    record.add(step(21, 99.0, skipped=True))
    assert (record.turns, record.above) == (20, 0)
    assert "skipped" not in verdict(record, skipped=1).text
    assert "9 of 30 steps were skipped" in verdict(record, skipped=9).text


def test_a_record_goes_on_through_json() -> None:
    whole, first = BudgetRecord(), BudgetRecord()
    used = [0.1 * number for number in range(60)]
    for number, one in enumerate(used[:25]):
        for record in (whole, first):
            record.add(step(number, one, lam=one, held_out=0.01))
    resumed = BudgetRecord(since=25)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for number, one in enumerate(used[25:], start=25):
        for record in (whole, resumed):
            record.add(step(number, one, lam=one))
    assert resumed.state_dict() == whole.state_dict()
    assert verdict(resumed) == verdict(whole)
    assert (resumed.since, resumed.turns) == (0, 60)


def test_a_run_of_an_earlier_version_is_judged_from_where_it_was_resumed() -> None:
    record = BudgetRecord(since=500)
    for number in range(501, 531):
        record.add(step(number, 0.5))
    assert "above it in 0 % of the steps since step 500" in verdict(record).text


def test_a_verdict_is_read_back_from_json() -> None:
    found = verdict(rising(2.9))
    assert Verdict.from_json(json.loads(json.dumps(found.to_json()))) == found
