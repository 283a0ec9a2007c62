"""--insulate: the task's gradient reaches the action expert as before, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import smolvla
from tiny.act import ACT
from tiny.pi0 import PI0
from tiny.pi05 import PI05
from tiny.world import save, write_dataset

from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.run import OpenedRun, open_run
from craftcli.errors import EXIT_USAGE, CraftError


def make_smolvla(folder: Path) -> Path:
    """LeRobot's own default freezes the language model already."""
    vlm = smolvla.write_vlm(folder.parent / "vlm")
    trained = {"train_expert_only": False, "freeze_vision_encoder": False}
    return save(folder, smolvla.policy(vlm, **trained))


MAKERS = {"pi0": PI0.make, "pi05": PI05.make, "smolvla": make_smolvla}


@pytest.fixture(scope="module", params=MAKERS)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    write_dataset(folder / "data")
    return MAKERS[request.param](folder / "policy"), folder / "data"


def opened(folders: tuple[Path, Path], output: Path, **settings: Any) -> OpenedRun:
    policy, data = map(str, folders)
    small: dict[str, Any] = {"steps": 2, "batch_size": 2, "mode": "none", "device": "cpu"}
    config = TrainConfig(policy=policy, dataset=data, output=output, **{**small, **settings})
    return open_run(config, {}, Processes())


def language_model(run: OpenedRun) -> set[int]:
    """The parameters of the vision-language model, by identity."""
    model = run.student.adapter.language_model(run.student.policy)
    assert model is not None
    return {id(parameter) for parameter in model.parameters()}


def gradients(run: OpenedRun) -> tuple[torch.Tensor, dict[str, Any], set[str]]:
    """The loss of a batch, the gradient of every parameter, and the names in the VLM."""
    policy = run.student.policy.train()
    torch.manual_seed(0)
    loss, _ = policy(run.sample_batch())
    loss.backward()
    named = list(policy.named_parameters())
    inside = language_model(run)
    names = {name for name, parameter in named if id(parameter) in inside}
    return loss.detach(), {name: parameter.grad for name, parameter in named}, names


def test_the_expert_learns_the_same_and_the_language_model_nothing(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    plain_loss, plain, vlm = gradients(opened(folders, tmp_path / "plain"))
    loss, found, _ = gradients(opened(folders, tmp_path / "insulated", insulate=True))
    assert torch.equal(loss, plain_loss)
    assert any(
        gradient is not None and gradient.any() for n in vlm if (gradient := plain[n]) is not None
    )
    assert all(found[name] is None for name in vlm)
    others = [name for name, gradient in plain.items() if gradient is not None and name not in vlm]
    assert any("expert" in name for name in others)
    for name in others:
        assert torch.equal(found[name], plain[name]), name


def test_a_run_leaves_the_language_model_as_it_was(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Weight decay would move it otherwise, and a resumed run must not forget."""
    run = opened(folders, tmp_path / "run", insulate=True)
    before = {name: p.detach().clone() for name, p in run.student.policy.named_parameters()}
    run.trainer().run(lambda _: None, lambda _: None, lambda _: None)
    resumed = open_run(TrainConfig(resume=tmp_path / "run"), {"steps": 3}, Processes())
    policy = resumed.student.policy
    inside = language_model(resumed)
    moved = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert any("expert" in name for name in moved)
    for name, parameter in policy.named_parameters():
        if id(parameter) in inside:
            assert name not in moved
            assert not parameter.requires_grad


def test_lora_weights_of_the_expert_alone_are_trained(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run = opened(folders, tmp_path / "run", insulate=True, lora="r=2,targets=q_proj")
    trained = [name for name, p in run.student.policy.named_parameters() if p.requires_grad]
    assert trained
    assert all("expert" in name for name in trained)
    with pytest.raises(CraftError, match="--insulate leaves nothing to train"):
        opened(folders, tmp_path / "none", insulate=True, lora="r=2,targets=*vision*.q_proj")


def test_a_policy_without_an_expert_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data")
    with pytest.raises(CraftError, match="--insulate cannot be used") as caught:
        opened((ACT.make(tmp_path / "policy"), tmp_path / "data"), tmp_path / "run", insulate=True)
    assert caught.value.exit_code == EXIT_USAGE
