"""Log lines carry the retention figures, whatever the cadence."""

import json
import math
import tracemalloc
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from craftcli.engine.method.constraint import Note
from craftcli.engine.method.projection import ProjectionReport
from craftcli.engine.metrics import (
    MetricsFile,
    RetentionReport,
    StepReport,
    Window,
    empty_entry,
    last_entry,
)


def turn(step: int, *, conflict: bool = False, measured: bool = True) -> RetentionReport:
    gradients = ProjectionReport(
        dot=-1.0, cos=-0.5, task_norm=3.0, ret_norm=1.0, conflict_share=float(conflict)
    )
    return RetentionReport(
        loss=0.01 * step,
        lam=1.0 + step,
        epsilon=0.02,
        gradients=gradients if measured else None,
        violated=step > 2,
        losses={"hidden": 0.01 * step, "hidden.vlm.2": 0.02 * step},
        lams={"joint": 1.0 + step},
    )


def report(step: int, retention: RetentionReport | None = None) -> StepReport:
    return StepReport(
        step=step,
        loss=float(step),
        grad_norm=2.0,
        lr=1e-3,
        update_s=0.1,
        data_s=0.01,
        retention=retention,
    )


def window_of(*reports: StepReport) -> Window:
    window = Window(steps=100, mode="hidden")
    for one in reports:
        window.add(one)
    return window


def test_a_line_reads_as_documented() -> None:
    entry = window_of(report(1, turn(1, conflict=True))).flush()
    assert entry.line() == (
        "Step 1/100 | loss=1.0000 | grdn=2.000 | lr=1.0e-03 | updt_s=0.100 | data_s=0.010 | "
        "anchor_s=0.000 | mode=hidden | L_ret=0.01 | λ=2.000 | ε=0.02 | dot=-1.00e+00 | "
        "cos=-0.500 | conflict=100%"
    )


def test_waiting_for_anchors_is_averaged_and_shown_with_retention_only() -> None:
    waits = [replace(report(n, turn(n)), anchor_s=0.5 * n) for n in (1, 3)]
    entry = window_of(*waits).flush()
    assert entry.anchor_s == 1.0
    assert " | anchor_s=1.000 | " in entry.line()
    plain = window_of(report(1)).flush()
    assert plain.anchor_s is None
    assert "anchor_s" not in plain.line()


def test_no_conflict_no_mark() -> None:
    assert "conflict" not in window_of(report(1, turn(1))).flush().line()


@pytest.mark.parametrize(("cadence", "every"), [(5, 50), (5, 7), (3, 10), (1, 4)])
def test_every_window_that_saw_a_turn_shows_it(cadence: int, every: int) -> None:
    """Pitfall 9: with K=5 and a log every 50, the prototypes never logged L_ret."""
    window = Window(steps=100, mode="hidden")
    for step in range(100):
        window.add(report(step + 1, turn(step) if step % cadence == 0 else None))
        if (step + 1) % every == 0:
            assert window.flush().l_ret is not None


def test_averages_are_over_the_steps_that_measured() -> None:
    entry = window_of(
        report(1, turn(1)), report(2), report(3, turn(3, conflict=True)), report(4)
    ).flush()
    assert entry.loss == 2.5
    assert entry.l_ret == pytest.approx(0.02)
    assert entry.lam == 4.0
    assert entry.conflict_rate == entry.violation_rate == 0.5


def test_a_window_is_empty_after_its_line() -> None:
    window = window_of(report(1, turn(1)))
    window.flush()
    window.add(report(2))
    assert window.flush().l_ret is None


def test_the_file_holds_one_object_a_line(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "metrics.jsonl")) as metrics:
        for step in (1, 2):
            metrics.write(window_of(report(step, turn(step))).flush())
            written = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert len(written) == step  # on disk at once, not when the run ends
    assert [json.loads(line)["step"] for line in written] == [1, 2]


def test_steps_that_were_skipped_are_counted_and_in_no_average() -> None:
    broken = replace(report(2), loss=math.nan, grad_norm=math.inf, skipped=True)
    entry = window_of(report(1), broken, report(3)).flush()
    assert (entry.loss, entry.grad_norm, entry.skipped) == (2.0, 2.0, 1)
    assert entry.line().endswith("| skipped=1")
    nothing = window_of(broken).flush()
    assert (nothing.loss, nothing.skipped) == (None, 1)
    assert "loss=- | grdn=-" in nothing.line()


def test_several_modes_are_shown_one_by_one() -> None:
    losses = {"hidden": 0.02, "action": 0.04, "hidden.vlm.2": 0.02}
    line = window_of(report(1, replace(turn(3), losses=losses))).flush().line()
    assert "| L_ret=0.03 | L_hidden=0.02 | L_action=0.04 | λ=" in line


def test_a_budget_that_is_not_found_yet_is_shown_as_auto() -> None:
    entry = window_of(report(1, replace(turn(1), epsilon=math.inf))).flush()
    assert entry.epsilon is None
    assert "| ε=auto |" in entry.line()


def test_a_window_goes_on_after_saving() -> None:
    whole, part = window_of(report(1, turn(1)), report(2)), window_of(report(1, turn(1)))
    resumed = window_of()
    resumed.load_state_dict(json.loads(json.dumps(part.state_dict())))
    resumed.add(report(2))
    assert resumed.flush() == whole.flush()


def test_a_window_resumes_through_json_and_keeps_notes_as_texts() -> None:
    noted = turn(2).with_notes([Note(text="λ is stuck", is_warning=True)])
    first, resumed = window_of(report(1), report(2, noted)), window_of()
    state = json.loads(json.dumps(first.state_dict()))
    assert state["reports"][1]["retention"]["notes"] == ["λ is stuck"]
    resumed.load_state_dict(state)
    assert resumed.state_dict() == first.state_dict()
    assert resumed.flush() == first.flush()


def test_steps_with_one_pass_carry_the_last_angle_and_its_step() -> None:
    window = window_of(report(9, turn(9, measured=False)), report(10, turn(10, conflict=True)))
    first = window.flush()
    assert (first.gradients_step, first.conflict_rate) == (10, 1.0)
    assert "| dot=-1.00e+00 | cos=-0.500 (step 10) | conflict=100%" in first.line()
    window.add(report(11, turn(11, measured=False)))
    resumed = window_of()
    resumed.load_state_dict(json.loads(json.dumps(window.state_dict())))
    for each in (window, resumed):
        later = each.flush()
        assert (later.step, later.gradients_step, later.cos) == (11, 10, -0.5)


def test_no_angle_is_shown_before_it_was_measured() -> None:
    entry = window_of(report(1, turn(1, measured=False))).flush()
    assert (entry.dot, entry.cos) == (None, None)
    assert "| dot=- | cos=-" in entry.line()


def test_a_window_of_an_earlier_version_is_read() -> None:
    (saved,) = window_of(report(1, turn(1, conflict=True))).state_dict()["reports"]
    gradients = saved["retention"].pop("gradients")
    saved["retention"] |= {**gradients, "conflict": True}
    resumed = window_of()
    resumed.load_state_dict([saved])
    assert resumed.flush() == window_of(report(1, turn(1, conflict=True))).flush()


def test_the_last_line_of_a_long_log_is_read_without_the_others(tmp_path: Path) -> None:
    entry = window_of(report(1, turn(1))).flush()
    with (tmp_path / "metrics.jsonl").open("w") as log:
        for step in range(1, 20_001):
            log.write(json.dumps(asdict(replace(entry, step=step))) + "\n")
    size = (tmp_path / "metrics.jsonl").stat().st_size
    tracemalloc.start()
    found = last_entry(tmp_path, steps=20_000, mode="hidden")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == replace(entry, step=20_000)
    assert peak < 5 * 2**20 < size


@pytest.mark.parametrize("content", [None, "", '{"step": 3, "lo', "1" * 2**21])
def test_a_log_that_cannot_be_read_has_an_empty_last_line(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert last_entry(tmp_path, steps=5, mode="none") == empty_entry(5, steps=5, mode="none")
