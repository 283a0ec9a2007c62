"""The sweeps of the demo run as their files say."""

import dataclasses
from pathlib import Path

import pytest

from craftcli.report.compare import compare_runs
from craftcli.sweeps.plan import plan_sweep
from craftcli.sweeps.running import run_sweep
from craftcli.sweeps.spec import EvalSpec, read_sweep

FOLDER = Path(__file__).parents[2] / "examples/demo_forgetting"
SHORT = {"steps": 2, "batch_size": 4, "anchor_batch_size": 4}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.toml")), ids=lambda file: file.stem)
def test_a_little_of_every_arm(file: Path, tmp_path: Path) -> None:
    spec = read_sweep(file)
    assert len(plan_sweep(spec).runs) == 3 * len(spec.arms)
    short = dataclasses.replace(
        spec,
        output=tmp_path / "sweep",
        seeds=(0,),
        cache={**spec.cache, "samples": 8},
        train={**spec.train, **SHORT},
        eval=EvalSpec(episodes=2),
        held_out={"samples": 4},
        # One point of each curve.
        arms=tuple({arm.curve or arm.name: arm for arm in spec.arms}.values()),
    )
    result = run_sweep(short)
    assert result.failures == {}
    comparison = compare_runs([result.folder])
    assert all(row.figures["old"] is not None for row in comparison.rows)
    assert comparison.plain is not None
