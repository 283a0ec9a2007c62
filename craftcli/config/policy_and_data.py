"""Settings shared by all commands that open a policy and a dataset."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, override

from craftcli.choices import Stats
from craftcli.config.dataset_list import (
    NamedDataset,
    list_problems,
    parse_datasets,
)
from craftcli.config.parsing import parse_renames
from craftcli.config.settings import Effect, Settings, option_name, setting

DEMO = "demo"
"""Name of the built-in policy and of its datasets."""

DEMO_DATASETS = ("craft-demo/old", "craft-demo/new")
"""The demo's two datasets by their names; `demo` is the one that a command needs."""

PANEL = "Policy and data"

REVISION_HELP = "Revision of a policy on the Hub: a branch, tag or commit."
DATASET_ROOT_HELP = "Folder of the dataset, when it is not in LeRobot's cache under its Hub name."
DATASET_REVISION_HELP = "Revision of a dataset on the Hub: a branch, tag or commit."
REMOTE_CODE_HELP = (
    "Allow Python code that comes with the policy's tokenizers to run. "
    "Only for policies that you trust."
)
DEVICE_HELP = "Device to compute on: cpu, cuda, cuda:1, mps, or auto for the fastest."


@dataclass(frozen=True, kw_only=True)
class PolicyAndData(Settings):
    """Which policy and which dataset a command works on."""

    policy: str = setting(
        DEMO,
        "LeRobot policy: a folder, a run of craft, or a Hub name. demo is the built-in one.",
        aliases=("--policy.path",),
        metavar="POLICY",
        panel=PANEL,
    )
    revision: str | None = setting(None, REVISION_HELP, metavar="REV", panel=PANEL)
    dataset: str | tuple[str, ...] = setting(
        DEMO,
        "LeRobotDataset: a folder or a Hub name. demo is the built-in one. Repeat the option for "
        "several, with weights as in --dataset a --dataset b:0.3; without weights, each counts by "
        "its frames.",
        aliases=("--dataset.repo_id",),
        metavar="DATA",
        panel=PANEL,
    )
    dataset_root: str | None = setting(
        None, DATASET_ROOT_HELP, aliases=("--dataset.root",), metavar="FOLDER", panel=PANEL
    )
    dataset_revision: str | None = setting(
        None, DATASET_REVISION_HELP, aliases=("--dataset.revision",), metavar="REV", panel=PANEL
    )
    rename: str | None = setting(
        None,
        "Rename features of the dataset that the policy calls differently, as in "
        "observation.images.cam=observation.images.top; several with commas.",
        metavar="OLD=NEW",
        panel=PANEL,
    )
    stats: Stats = setting(
        Stats.WIDEN,
        "Statistics that normalise the data. widen: the policy's own, and the dataset's for "
        "features that the policy's lack and numbers that stood still in them. teacher: only the "
        "policy's own. dataset: the dataset's; anchors that a run makes follow widen.",
        panel=PANEL,
    )
    trust_remote_code: bool = setting(
        False, REMOTE_CODE_HELP, panel=PANEL, effect=Effect.PERMISSION
    )
    device: str = setting("auto", DEVICE_HELP, metavar="DEVICE", effect=Effect.COMPUTING)
    seed: int = setting(0, "Seed of all random numbers.", low=0, high=2**64 - 1)

    @override
    def problems(self) -> list[str]:
        # Other data fit no policy of the demo's; its own data fit what was trained from it.
        alone = {option_name(n): getattr(self, n) for n in ("dataset_root", "dataset_revision")}
        if found := list_problems("--dataset", self.dataset, alone=alone):
            return found
        names = [entry.name for entry in self.datasets]
        of_demo = any(name in (DEMO, *DEMO_DATASETS) for name in names)
        if self.policy == DEMO and not of_demo and self.needs_dataset:
            return ["--policy is needed when the other of --policy and --dataset is given"]
        own = ("revision", "dataset_root", "dataset_revision", "rename")
        found = [
            f"{option_name(name)} needs --policy and --dataset; the demo has none"
            for name in (own if self.is_demo else ())
            if getattr(self, name) is not None
        ]
        try:
            _ = self.renames
        except ValueError as error:
            found.append(f"--rename {error}")
        return found

    @override
    def not_chosen(self, chosen: Collection[str]) -> list[str]:
        # The demo's data are the default, and the user's own policy was made for others.
        if self.policy == DEMO or "dataset" in chosen or not self.needs_dataset:
            return []
        return ["--dataset is needed when the other of --policy and --dataset is given"]

    @property
    def needs_dataset(self) -> bool:
        """Whether the command reads a dataset."""
        return True

    @property
    def datasets(self) -> tuple[NamedDataset, ...]:
        """The datasets of --dataset, in the order of the list."""
        return parse_datasets(self.dataset)

    @property
    def renames(self) -> dict[str, str]:
        """The policy's name for each feature that the dataset calls differently."""
        return {} if self.rename is None else parse_renames(self.rename)

    @classmethod
    @override
    def wants_demo(cls, chosen: Mapping[str, Any]) -> bool:
        return bool(chosen.get("policy", DEMO) == DEMO)

    @property
    def is_demo(self) -> bool:
        """Whether the built-in policy and datasets are used."""
        return self.policy == DEMO
