"""Opens the policies and datasets that a command names: the user's, or the demo's.

The word `demo` is resolved here and nowhere else: `--policy demo` is the teacher that comes with
craft, `--dataset demo` one of its two datasets, which are written to disk on first use. Both also
have names of their own, `craft-demo/old` and `craft-demo/new`.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from craftcli.cache.format import Manifest
from craftcli.cache.identity import match_teacher
from craftcli.choices import Stats
from craftcli.config.cache import CacheConfig
from craftcli.config.dataset_list import NamedDataset
from craftcli.config.policy_and_data import DEMO, PolicyAndData
from craftcli.config.train import TrainConfig
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.datasets import NEW, OLD, DemoDataset, demo_root, ensure_dataset
from craftcli.demo.defaults import is_of_demo
from craftcli.demo.world import instruction
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import TakesSize, open_dataset, require_finite
from craftcli.policies.lerobot.identity import dataset_identity, teacher_identity
from craftcli.policies.lerobot.instructions import read_instructions
from craftcli.policies.lerobot.lora import add_lora
from craftcli.policies.lerobot.several_datasets import (
    SeveralDatasets,
    parts_of,
    require_same_features,
)
from craftcli.policies.lerobot.task_processors import as_the_anchors, takes_size


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where a dataset is: what `open_dataset` takes."""

    repo_id: str
    root: str | None = None
    revision: str | None = None
    group: str | None = None
    """`old` or `new` if the dataset is known to hold that skill."""
    number: int | None = None
    """Its place in the list that a run was trained on, from 0; None if it is in none."""

    @property
    def place(self) -> str | None:
        """The folder of the dataset, if it is named by one."""
        folder = Path(self.repo_id).expanduser()
        return self.root or (str(folder) if folder.is_dir() else None)

    def open(
        self,
        policy_config: Any,
        renames: Mapping[str, str],
        takes_size: TakesSize | None = None,
    ) -> Any:
        """The dataset, with the frames and features that a policy of this configuration reads."""
        return open_dataset(
            self.repo_id,
            root=self.root,
            revision=self.revision,
            policy_config=policy_config,
            renames=renames,
            takes_size=takes_size,
        )

    def open_for(self, policy: Checkpoint, stats: Stats | None = None) -> Any:
        """The dataset for a policy, which may be able to read other sizes than its own."""
        takes = functools.partial(takes_size, policy, stats)
        return self.open(policy.policy.config, policy.renames, takes)


def policy_location(policy: str) -> str:
    """The folder or Hub name of a policy; `demo` becomes the folder of the demo's teacher."""
    return str(TEACHER_FOLDER) if policy == DEMO else policy


def load_policy(
    policy: str,
    *,
    device: str,
    revision: str | None = None,
    renames: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Load a policy by the name that `--policy` takes, on a device that `--device` takes."""
    return load_checkpoint(
        policy_location(policy),
        device=choose_device(device),
        revision=revision,
        renames=renames,
        trust_remote_code=trust_remote_code,
    )


def open_policy(config: PolicyAndData) -> Checkpoint:
    """Load the policy that a command names, unchanged: a teacher."""
    return load_policy(
        config.policy,
        device=config.device,
        revision=config.revision,
        renames=config.renames,
        trust_remote_code=config.trust_remote_code,
    )


def open_teacher(
    manifest: Manifest,
    *,
    device: str,
    named: str | None = None,
    renames: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Load the teacher of a cache: the policy that the user or a run names, or the demo's.

    The place in the manifest is not opened: a cache may come from anybody.

    Raises:
        CraftError: no policy is named, or another than the cache's teacher.
    """
    differences = []
    for source in (named, DEMO if is_of_demo(manifest.teacher.policy_type) else None):
        if source is None:
            continue
        loaded = load_policy(
            source, device=device, renames=renames, trust_remote_code=trust_remote_code
        )
        teacher = as_the_anchors(loaded, manifest.statistics)
        matches = match_teacher(manifest, teacher_identity(teacher))
        changed = [match.field for match in matches if not match.matches]
        if not changed:
            return teacher
        differences.append(f"{', '.join(changed)} of {source} differ from the cache's")
    raise _no_teacher(manifest, "; ".join(differences) or "nobody named it")


def open_student(config: TrainConfig) -> Checkpoint:
    """Load the policy to train, with new LoRA weights if the run trains those."""
    policy = open_policy(config)
    return add_lora(policy, config.lora_spec, seed=config.seed) if config.lora_spec else policy


def data_source(
    dataset: str, *, root: str | None, revision: str | None, demo: DemoDataset
) -> DataSource:
    """Where a dataset is, by the options of a command; `demo` is the one that --dataset demo means.

    The demo's dataset is written to disk on first use.
    """
    named = {DEMO: demo, OLD.repo_id: OLD, NEW.repo_id: NEW}
    if dataset in named:
        return _demo_source(named[dataset])
    return DataSource(repo_id=dataset, root=root, revision=revision)


def config_sources(config: PolicyAndData, demo: DemoDataset) -> list[DataSource]:
    """Where the datasets of --dataset are, in the order of the list."""
    return [
        data_source(
            entry.name, root=config.dataset_root, revision=config.dataset_revision, demo=demo
        )
        for entry in config.datasets
    ]


def dataset_sources(dataset: str) -> tuple[DataSource, ...]:
    """The datasets of a name: `demo` is two, the demo's old and new one."""
    if dataset == DEMO:
        return _demo_source(OLD), _demo_source(NEW)
    return (data_source(dataset, root=None, revision=None, demo=NEW),)


def open_anchor_data(config: PolicyAndData, policy: Checkpoint) -> Any:
    """Open the old data that anchors are taken from: a dataset, or several as one."""
    return _open_data(config, policy, OLD)


def open_moving_data(config: CacheConfig, policy: Checkpoint) -> Any:
    """Open the dataset of --moves-like; None if there is none."""
    if config.moves_like is None:
        return None
    return data_source(config.moves_like, root=None, revision=None, demo=NEW).open_for(policy)


def open_task_data(config: PolicyAndData, policy: Checkpoint) -> Any:
    """Open the new data that the policy is fine-tuned on."""
    dataset = _open_data(config, policy, NEW)
    for part in parts_of(dataset) or (dataset,):
        require_finite(part, policy.policy.config, policy.renames)
    return dataset


def open_old_data(config: TrainConfig, policy: Checkpoint) -> Any:
    """Open the dataset of --old-dataset; None if there is none."""
    if config.old_dataset is None:
        return None
    sources = [
        data_source(entry.name, root=config.old_dataset_root, revision=None, demo=OLD)
        for entry in config.old_datasets
    ]
    return open_sources(sources, config.old_datasets, policy)


def open_sources(
    sources: Sequence[DataSource],
    named: Sequence[NamedDataset],
    policy: Checkpoint,
    stats: Stats | None = None,
) -> Any:
    """Open a dataset, or several as one with the weights of the list that names them.

    Raises:
        CraftError: one cannot be opened, two are the same, or they differ in a feature.
    """
    opened = [source.open_for(policy, stats) for source in sources]
    if len(opened) == 1:
        return opened[0]
    _require_different(opened)
    require_same_features(opened, policy.policy.config, policy.renames)
    weights = [entry.weight for entry in named]
    return SeveralDatasets(opened, weights=weights, renames=policy.renames)


def _require_different(opened: Sequence[Any]) -> None:
    """Refuse the same data under two names."""
    seen: dict[str, str] = {}
    for dataset in opened:
        fingerprint = dataset_identity(dataset, []).fingerprint
        if fingerprint in seen:
            raise CraftError(
                "The same dataset is named twice.",
                why=f"{seen[fingerprint]} and {dataset.root} hold the same data.",
                fix="name it once; a weight, as in NAME:2, makes it count more.",
                exit_code=EXIT_USAGE,
            )
        seen[fingerprint] = str(dataset.root)


def old_instructions(config: TrainConfig) -> tuple[str, ...]:
    """The instructions that the policy knew before, by --old-tasks; the demo's are known."""
    if config.old_tasks is not None:
        return read_instructions(config.old_tasks)
    return tuple(instruction(colour) for colour in OLD.colours) if config.is_demo else ()


def data_status(config: PolicyAndData, demo_dataset: DemoDataset) -> str:
    """What to show the user while the policy and the data are opened."""
    if config.is_demo and not demo_root(demo_dataset).is_dir():
        return f"Writing the demo's dataset to {demo_root(demo_dataset)}, this once ..."
    return "Loading the policy and the data ..."


def choose_device(name: str) -> str:
    """The device to compute on; `auto` picks a GPU if there is one.

    Raises:
        CraftError: torch cannot use this device.
    """
    if name == "auto":
        if torch.cuda.is_available():
            # Under torchrun every process of a machine gets a GPU of its own.
            return f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise CraftError(
            f"The device {name!r} cannot be used.",
            why=f"{str(error).splitlines()[0]}",
            fix="use --device auto.",
            exit_code=EXIT_USAGE,
        ) from error
    return name


def _open_data(config: PolicyAndData, policy: Checkpoint, demo: DemoDataset) -> Any:
    return open_sources(config_sources(config, demo), config.datasets, policy, config.stats)


def _demo_source(dataset: DemoDataset) -> DataSource:
    group = "new" if dataset is NEW else "old"
    return DataSource(repo_id=dataset.repo_id, root=str(ensure_dataset(dataset)), group=group)


def _no_teacher(manifest: Manifest, why: str) -> CraftError:
    return CraftError(
        "Cannot load the teacher of the cache.",
        why=f"the cache was built with {manifest.teacher.source}: {why}.",
        fix="name it with --teacher, or build the cache with --kind hidden+action, which stores "
        "the teacher's outputs.",
    )
