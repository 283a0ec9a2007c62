"""Every family trains in two processes, with retention, and both end with the same weights."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny.act import STATE_ONLY
from tiny.diffusion import DIFFUSION
from tiny.family import Family
from tiny.molmoact2 import MOLMOACT2
from tiny.multi_task_dit import FLOWED
from tiny.pi0 import PI0
from tiny.pi0_fast import PI0_FAST
from tiny.pi05 import PI05
from tiny.processes import together
from tiny.smolvla import SMOLVLA
from tiny.vqbet import VQBET
from tiny.world import write_dataset
from tiny.xvla import XVLA

from craftcli.cache.build.build import build_cache
from craftcli.config.cache import CacheConfig
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.run import open_run
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset

STEPS = 5
# Each once: the variants differ in what they compute, not in how gradients are shared.
FAMILIES = (STATE_ONLY, DIFFUSION, VQBET, FLOWED, SMOLVLA, PI05, PI0, PI0_FAST, XVLA, MOLMOACT2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")


def run(config: TrainConfig, into: Path) -> None:
    """Train, and write what each step saw and a digest of the weights."""
    processes = Processes.from_environment()
    with processes.connected():
        seen: list[Any] = []
        opened = open_run(config, {}, processes)
        for step in opened.trainer().steps():
            assert step.retention is not None
            seen.append([step.loss, step.grad_norm, step.retention.loss, step.retention.lam])
        state = opened.student.policy.state_dict()
        sums = [value.double().sum().item() for value in state.values()]
        finite = all(value.isfinite().all() for value in state.values())
    report = {"seen": seen, "sums": sums, "finite": finite}
    into.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(report))


# xvla: some gradients come in another memory order than DDP's, which it copies.
@pytest.mark.filterwarnings("ignore:Grad strides do not match")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_five_steps_under_ddp(family: Family, data: Path, tmp_path: Path) -> None:
    policy, cache = family.make(tmp_path / "policy"), tmp_path / "a.zarr"
    paths: dict[str, Any] = {"policy": str(policy), "dataset": str(data), "device": "cpu"}
    teacher = load_checkpoint(paths["policy"], device="cpu")
    dataset = open_dataset(paths["dataset"], root=None, policy_config=teacher.policy.config)
    build_cache(
        CacheConfig(**paths, output=cache, samples=4, kind="hidden+action"),
        teacher,
        dataset,
        on_plan=lambda _: None,
        on_rows=lambda _: None,
    )
    config = TrainConfig(
        **paths,
        cache=cache,
        output=tmp_path / "run",
        mode="hidden+action",
        steps=STEPS,
        batch_size=1,
        anchor_batch_size=1,
        lr=1e-3,
        save_every=0,
    )
    together(lambda: run(config, tmp_path / "report"))
    first, second = (json.loads((tmp_path / f"report.{rank}").read_text()) for rank in (0, 1))
    assert len(first["seen"]) == STEPS
    assert first == second
    assert first["finite"]
    assert first["seen"][-1][2] > 1e-8  # the student has moved, and retention saw it
    before = [value.double().sum().item() for value in teacher.policy.state_dict().values()]
    assert torch.tensor(before).ne(torch.tensor(first["sums"])).any()
