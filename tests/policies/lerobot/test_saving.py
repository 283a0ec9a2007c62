"""Checkpoints that craft writes, beside those of LeRobot's own writer."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.common.train_utils import get_step_identifier, save_checkpoint
from lerobot.policies.common import vla_utils

from craftcli.config.parsing import parse_lora
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.policies.attention_masks import additive, block_attention
from craftcli.policies.lerobot.lora import add_lora
from craftcli.policies.lerobot.lora_files import as_peft_names, quiet_peft
from craftcli.policies.lerobot.saving import read_optimizer_state, step_name
from craftcli.policies.lerobot.training import (
    optimizer_and_scheduler,
    pipeline_config,
    write_policy,
)

STEP = 7
COUNTS = "training_state/training_step.json"
GIVEN_STATES = "model_state_dict" in inspect.signature(save_checkpoint).parameters
"""Up to 0.6.1, LeRobot's writer takes gathered states and what it is to write into COUNTS."""


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def stepped(student: Any, data: Any, folder: Path) -> tuple[Any, Any, Any]:
    """LeRobot's description of a run, its optimizer after one step, and the schedule."""
    config = TrainConfig(steps=20, batch_size=4, device="cpu")
    pipeline = pipeline_config(config, student, data, folder)
    optimizer, scheduler = optimizer_and_scheduler(pipeline, student.policy)
    for parameter in student.policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    scheduler.step()
    return pipeline, optimizer, scheduler


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("gathered", [False, True] if GIVEN_STATES else [False])
def test_the_bytes_are_those_of_lerobots_own_writer(
    student: Any, new_data: Any, tmp_path: Path, lora: bool, gathered: bool
) -> None:
    if lora:
        student = add_lora(student, parse_lora("r=2,targets=q_proj;v_proj"), seed=0)
    pipeline, optimizer, scheduler = stepped(student, new_data, tmp_path)
    states: tuple[dict[str, Any], dict[str, Any]] | None = None
    if gathered:
        named = {"state": {"a.b": {"step": torch.ones(())}}, "param_groups": [{"lr": 0.5}]}
        states = {k: v.clone() for k, v in student.policy.state_dict().items()}, named
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    write_policy(
        own,
        STEP,
        pipeline=pipeline,
        student=student,
        optimizer=optimizer,
        scheduler=scheduler,
        processes=Processes(),
        gathered=states,
    )
    model = as_peft_names(states[0]) if states and lora else states and states[0]
    given = {
        "num_processes": 1,
        "batch_size": 4,
        "model_state_dict": model,
        "optim_state_dict": states and states[1],
    }
    with quiet_peft():
        save_checkpoint(
            theirs,
            step=STEP,
            cfg=pipeline,
            policy=student.trained,
            optimizer=optimizer,
            scheduler=scheduler,
            preprocessor=student.preprocess,
            postprocessor=student.postprocess,
            **(given if GIVEN_STATES else {}),
        )
    ours, lerobots = files(own), files(theirs)
    assert ours.keys() == lerobots.keys()
    assert len(ours) >= 10
    differing = [name for name in ours if ours[name] != lerobots[name]]
    assert differing == ([] if GIVEN_STATES else [COUNTS])
    assert json.loads(ours[COUNTS])["step"] == json.loads(lerobots[COUNTS])["step"] == STEP
    written = states[1] if states else optimizer.state_dict()
    found = read_optimizer_state(own)
    assert found["param_groups"] == json.loads(json.dumps(written["param_groups"]))
    expected = {str(name): state for name, state in written["state"].items()}
    torch.testing.assert_close(found["state"], expected, rtol=0, atol=0)


@pytest.mark.parametrize(("step", "steps"), [(0, 1), (400, 400), (5, 12_345_678)])
def test_folders_are_named_as_lerobot_names_them(step: int, steps: int) -> None:
    assert step_name(step, steps) == get_step_identifier(step, steps)


def test_attention_masks_are_lerobots() -> None:
    pad = torch.tensor([[True, True, True, False], [True, True, True, True]])
    starts = torch.tensor([[0, 0, 1, 0], [1, 0, 1, 1]])
    seen = block_attention(pad, starts)
    assert torch.equal(seen, vla_utils.make_att_2d_masks(pad, starts))
    for dtype in (None, torch.bfloat16):
        expected = vla_utils.prepare_attention_masks_4d(seen, dtype)
        assert torch.equal(additive(seen, dtype), expected)
        assert additive(seen, dtype).dtype == expected.dtype
