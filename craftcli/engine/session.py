"""Opening what a command works on: policy, datasets and anchors, the user's or the demo's."""

import os
from typing import Any

import torch

from craftcli.config import PolicyAndData, TrainConfig
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.datasets import NEW, OLD, DemoDataset, demo_root, ensure_dataset
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.adapters import add_adapters
from craftcli.policies.data import open_dataset
from craftcli.policies.loading import Checkpoint, load_checkpoint


def open_policy(config: PolicyAndData) -> Checkpoint:
    """The policy as it is: a teacher."""
    source = str(TEACHER_FOLDER) if config.is_demo else config.policy
    return load_checkpoint(
        source,
        device=choose_device(config.device),
        revision=config.revision,
        renames=config.renames,
        trust_remote_code=config.trust_remote_code,
    )


def open_student(config: TrainConfig) -> Checkpoint:
    """The policy before its first step, with the adapters that are to be trained, if any."""
    policy = open_policy(config)
    return add_adapters(policy, config.adapters, seed=config.seed) if config.adapters else policy


def open_anchor_data(config: PolicyAndData, policy: Checkpoint) -> Any:
    """The old data that anchors are taken from."""
    return _open_data(config, policy, OLD)


def open_task_data(config: PolicyAndData, policy: Checkpoint) -> Any:
    """The new data that the policy is fine-tuned on."""
    return _open_data(config, policy, NEW)


def data_status(config: PolicyAndData, for_demo: DemoDataset) -> str:
    """What opening the data means right now, for someone who waits for it."""
    if config.is_demo and not demo_root(for_demo).is_dir():
        return f"Writing the demo's dataset to {demo_root(for_demo)}, this once ..."
    return "Loading the policy and the data ..."


def choose_device(wanted: str) -> str:
    """The device to compute on; `auto` is the best there is."""
    if wanted == "auto":
        if torch.cuda.is_available():
            # Under torchrun every process of a machine gets a GPU of its own.
            return f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise CraftError(
            f"The device {wanted!r} cannot be used.",
            why=f"{str(error).splitlines()[0]}",
            fix="use --device auto.",
            exit_code=EXIT_USAGE,
        ) from error
    return wanted


def _open_data(config: PolicyAndData, policy: Checkpoint, for_demo: DemoDataset) -> Any:
    repo_id, root = config.dataset, config.dataset_root
    if config.is_demo:
        repo_id, root = for_demo.repo_id, str(ensure_dataset(for_demo))
    return open_dataset(
        repo_id,
        root=root,
        revision=config.dataset_revision,
        policy_config=policy.policy.config,
        renames=policy.renames,
    )
