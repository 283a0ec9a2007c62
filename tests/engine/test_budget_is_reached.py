"""λ follows the size of the violation: a budget is reached in tens of steps, not in thousands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_a_budget_that_was_far_exceeded_is_reached_in_tens_of_steps(
    craft: Callable[..., Any], tmp_path: Path
) -> None:
    assert craft("cache", "build", "--layers", "-2,-1").exit_code == 0
    trained = craft("train", "--mode", "hidden", "--steps", "150", "--log-every", "5", "-o", "run")
    assert trained.exit_code == 0, trained.output
    lines = (tmp_path / "run/metrics.jsonl").read_text("utf-8").splitlines()
    log = [json.loads(line) for line in lines]
    used = {row["step"]: row["l_ret"] / row["epsilon"] for row in log}
    assert max(used.values()) > 3  # what is learned first takes the policy far out
    assert all(share < 1 for step, share in used.items() if step > 95)
    assert "within its budget" in trained.output
