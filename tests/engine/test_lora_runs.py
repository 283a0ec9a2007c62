"""Runs that train LoRA weights: held like any other, saved, and trained further."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.configs.train import TrainPipelineConfig
from safetensors.torch import load_file

from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.retention.gradient_reach import (
    SMALL_PART,
    GradientReach,
    describe_downstream,
    describe_trainable,
    find_reach,
    require_reach,
)
from craftcli.engine.retention.self_check import self_check
from craftcli.engine.run import OpenedRun, open_run, prepare
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE, CraftError
from craftcli.policies.lerobot.lora_files import LORA_WEIGHTS

LORA = "r=4,alpha=8,targets=q_proj;v_proj"


def opened(output: Path, cache: Path, **changed: Any) -> OpenedRun:
    small = {"steps": 3, "batch_size": 2, "anchor_batch_size": 4, "device": "cpu", "lora": LORA}
    small |= {"mode": "hidden"}
    return open_run(
        TrainConfig(**{**small, **changed}, output=output, cache=cache), {}, Processes()
    )


def train(run: OpenedRun) -> dict[str, torch.Tensor]:
    """The LoRA weights that a run ends with."""
    nothing: Callable[[object], None] = lambda _: None  # noqa: E731
    result = run.trainer().run(nothing, nothing, nothing)
    return load_file(result.checkpoint / "pretrained_model" / LORA_WEIGHTS)


def reach_of(run: OpenedRun) -> GradientReach:
    assert run.terms is not None
    batch = run.sample_batch()
    return find_reach(run.student.policy, run.student.adapter, run.terms, batch)


def test_a_student_with_new_lora_weights_still_is_its_teacher(cache: Path, tmp_path: Path) -> None:
    """The cache's check of identity lets it pass, and L_ret is 0 to the bit."""
    run = opened(tmp_path / "run", cache)
    assert run.terms is not None
    check = self_check(run.terms)
    assert check is not None
    assert check.drift == 0


def test_both_lora_matrices_are_found_to_be_held(cache: Path, tmp_path: Path) -> None:
    """Before the first step the second is 0, and no gradient passes it to the first."""
    run = opened(tmp_path / "run", cache)
    before = {n: p.clone() for n, p in run.student.policy.named_parameters()}
    reach = reach_of(run)
    assert len(reach.trainable) == 24
    assert reach.retained == reach.trainable
    assert reach.downstream == frozenset()
    parts = describe_trainable(run.student.policy, run.student.adapter, reach)
    assert (
        parts == "vision_tower 0.002M trained, 0.002M held, "
        "language_model 0.003M trained, 0.003M held"
    )
    for name, parameter in run.student.policy.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_lora_weights_behind_what_is_held_are_free(cache: Path, tmp_path: Path) -> None:
    run = opened(tmp_path / "run", cache, lora="r=2,targets=q_proj;lm_head")
    reach = reach_of(run)
    assert len(reach.retained) == len(reach.trainable) - 2
    assert describe_downstream(reach, frozen=False).endswith("lm_head.lora_A, lm_head.lora_B")


def test_lora_weights_behind_what_is_held_are_frozen_if_they_are_few(
    cache: Path, tmp_path: Path
) -> None:
    attention, mlp = "q_proj;k_proj;v_proj;o_proj", "gate_proj;up_proj;down_proj"
    run = opened(tmp_path / "run", cache, lora=f"r=2,targets={attention};{mlp};lm_head")
    assert run.terms is not None
    prepared = prepare(run, run.terms)
    assert 0 < prepared.reach.share(prepared.reach.downstream) <= SMALL_PART
    assert prepared.run.froze_downstream
    assert prepared.run.free_share == 0
    behind = {n for n, p in run.student.policy.named_parameters() if "lm_head.lora_" in n}
    assert prepared.reach.downstream == behind
    frozen = [p for n, p in run.student.policy.named_parameters() if n in behind]
    assert not any(parameter.requires_grad for parameter in frozen)
    other = opened(tmp_path / "many", cache, lora="r=2,targets=q_proj;lm_head")
    assert other.terms is not None
    left = prepare(other, other.terms)
    assert left.reach.share(left.reach.downstream) > SMALL_PART
    assert not left.run.froze_downstream
    assert left.run.free_share > SMALL_PART


def test_lora_weights_that_retention_does_not_reach_are_an_error(
    cache: Path, tmp_path: Path
) -> None:
    run = opened(tmp_path / "run", cache, lora="r=2,targets=lm_head")
    with pytest.raises(CraftError, match="reaches none of the 2 trainable tensors") as caught:
        require_reach(reach_of(run))
    assert caught.value.exit_code == EXIT_CHECK_FAILED


def test_only_lora_weights_move(cache: Path, tmp_path: Path, teacher: Any) -> None:
    run = opened(tmp_path / "run", cache)
    start = {n: p.clone() for n, p in run.student.policy.named_parameters()}
    train(run)
    moved = {n for n, p in run.student.policy.named_parameters() if not torch.equal(p, start[n])}
    assert moved == {n for n in start if "lora_" in n}
    base = {n.replace(".base_layer", ""): p for n, p in start.items() if "lora_" not in n}
    assert base.keys() == dict(teacher.policy.named_parameters()).keys()


def test_lerobot_reads_how_the_run_was_made(cache: Path, tmp_path: Path) -> None:
    train(opened(tmp_path / "run", cache))
    folder = tmp_path / "run/checkpoints/last/pretrained_model"
    theirs = TrainPipelineConfig.from_pretrained(str(folder))
    assert theirs.policy.use_peft
    assert (theirs.peft.r, theirs.peft.lora_alpha, theirs.peft.method_type) == (4, 8, "LORA")
    assert theirs.peft.target_modules == ["q_proj", "v_proj"]


def test_layers_computed_again_give_the_same_lora_weights(cache: Path, tmp_path: Path) -> None:
    """Gradient checkpointing must not lose gradients because the inputs of layers need none."""
    plain = train(opened(tmp_path / "plain", cache))
    again = train(opened(tmp_path / "again", cache, gradient_checkpointing=True))
    for name, tensor in plain.items():
        assert torch.allclose(tensor, again[name], atol=1e-6)


def test_a_run_of_lora_weights_is_a_policy_to_start_from(
    cache: Path, tmp_path: Path, new_data: Any
) -> None:
    """Its LoRA weights are trained further, and it is no longer the teacher of the first cache."""
    first = train(opened(tmp_path / "first", cache))
    data = {"policy": str(tmp_path / "first"), "dataset": new_data.repo_id}
    data["dataset_root"] = str(new_data.root)
    with pytest.raises(CraftError, match=r"another teacher.*weights_digest"):
        opened(tmp_path / "second", cache, lora=None, **data)
    run = opened(tmp_path / "second", cache, lora=None, mode="none", **data)
    for name, tensor in first.items():
        own = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(run.student.policy.state_dict()[own], tensor)
    second = train(run)
    assert second.keys() == first.keys()
    assert not any(torch.equal(second[name], first[name]) for name in first)
    with pytest.raises(CraftError, match="has LoRA weights already") as caught:
        opened(tmp_path / "third", cache, mode="none", **data)
    assert caught.value.exit_code == EXIT_USAGE
