"""The examples of library use: at most 40 lines each, run as their READMEs say."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN, ACCELERATE = EXAMPLES / "own_loop/train.py", EXAMPLES / "accelerate_loop/train.py"

CHECK = f"""
import runpy, sys, torch
import torch.distributed as dist
from craftcli.engine.execution import Execution

names = runpy.run_path({str(ACCELERATE)!r}, run_name="__main__")
policy, retention = names["checkpoint"].policy, names["retention"]
trained = [p for p in policy.parameters() if p.requires_grad]

def work(number):
    return lambda: retention.losses(number)["hidden"].total

def gradients():
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    policy.zero_grad()
    return torch.cat([g.flatten() for g in found])

flat = torch.cat([p.detach().flatten() for p in trained] + [torch.tensor([retention.lam])])
theirs = [torch.empty_like(flat) for _ in range(2)]
dist.all_gather(theirs, flat)
assert torch.equal(*theirs), "the processes have trained different policies"

# What one process computes from the anchors of both.
Execution(policy).accumulate([work(0), work(1)])
expected = gradients()
retention.execution.accumulate([work(dist.get_rank())])
assert expected.norm() > 0
torch.testing.assert_close(gradients(), expected)
print("agreed", dist.get_world_size())
"""


def run(script: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    return runpy.run_path(str(script), run_name="__main__")


def drifts(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"L_ret=(\S+)", printed)]


@pytest.mark.parametrize("script", [OWN, ACCELERATE])
def test_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 40


def test_own_loop_is_held(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run(OWN, monkeypatch, str(cache), "--steps", "3")
    first, *later = drifts(capsys.readouterr().out)
    assert first < 1e-6
    assert len(later) == 2
    assert later[-1] > 0
    assert names["report"].gradients.ret_norm > 0


def test_accelerate_loop_is_held(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.state import AcceleratorState, GradientState

    try:
        names = run(ACCELERATE, monkeypatch, str(cache), "--steps", "3", "--cpu")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    first, *later = drifts(capsys.readouterr().out)
    assert first < 1e-6
    assert later[-1] > 0
    assert names["report"].gradients.ret_norm > 0


@pytest.mark.slow
def test_accelerate_loop_is_the_same_in_two_processes(cache: Path, tmp_path: Path) -> None:
    check = tmp_path / "check.py"
    check.write_text(CHECK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc_per_node", "2", str(check), str(cache), "--steps", "3", "--cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agreed 2") == 2
    assert len(drifts(done.stdout)) == 3
