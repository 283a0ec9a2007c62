"""Settings of `craft cache inspect`."""

from dataclasses import dataclass
from pathlib import Path
from typing import override

from craftcli.config.dataset_list import NamedDataset, list_problems, parse_datasets
from craftcli.config.parsing import parse_renames
from craftcli.config.policy_and_data import (
    DATASET_REVISION_HELP,
    DATASET_ROOT_HELP,
    DEMO,
    DEVICE_HELP,
    PANEL,
    REMOTE_CODE_HELP,
    REVISION_HELP,
)
from craftcli.config.settings import Effect, Settings, option_name, setting
from craftcli.locations import RemotePath

VERIFY_ROWS = 8
_CHECKS = "Checks and plot"


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Settings):
    """Which cache to inspect, and what to check it against; None where nothing was chosen."""

    path: Path | RemotePath = setting(
        Path("anchors.zarr"), "The cache: a folder or a URL.", positional=True
    )
    verify: bool = setting(
        False,
        "Check every chunk, and run the teacher again over a few rows: the one of --policy, or the "
        "demo's. No policy is opened because the cache names it.",
        panel=_CHECKS,
    )
    verify_rows: int | None = setting(
        None,
        f"Rows over which --verify runs the teacher; 0 for none. Default: {VERIFY_ROWS}.",
        low=0,
        panel=_CHECKS,
    )
    plot: Path | None = setting(
        None, "Draw the cache into this PNG file.", metavar="FILE", panel=_CHECKS
    )
    policy: str | None = setting(
        None,
        "Compare the teacher with this policy: a folder, a run, a Hub name, or demo.",
        aliases=("--policy.path",),
        metavar="POLICY",
        panel=PANEL,
    )
    revision: str | None = setting(None, REVISION_HELP, metavar="REV", panel=PANEL)
    dataset: str | tuple[str, ...] | None = setting(
        None,
        "Compare the dataset with this one: a folder, a Hub name, or demo. Repeat the option for a "
        "cache of several, in their order.",
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
        "The --rename with which the cache was built: OLD=NEW, several with commas.",
        metavar="OLD=NEW",
        panel=PANEL,
    )
    trust_remote_code: bool = setting(
        False, REMOTE_CODE_HELP, panel=PANEL, effect=Effect.PERMISSION
    )
    device: str | None = setting(
        None,
        DEVICE_HELP + " Default: auto.",
        metavar="DEVICE",
        panel=PANEL,
        effect=Effect.COMPUTING,
    )

    @override
    def problems(self) -> list[str]:
        alone = {option_name(n): getattr(self, n) for n in ("dataset_root", "dataset_revision")}
        if found := list_problems("--dataset", self.dataset, alone=alone):
            return found
        own_policy, own_dataset = (x not in (None, DEMO) for x in (self.policy, self.dataset))
        needs = (
            ("verify_rows", self.verify, "--verify"),
            ("revision", own_policy, "--policy with the name of one on the Hub"),
            ("dataset_root", own_dataset, "--dataset with a name other than demo"),
            ("dataset_revision", own_dataset, "--dataset with the name of one on the Hub"),
            ("rename", self.policy or self.verify, "--policy or --verify"),
            ("device", self.policy or self.verify, "--policy or --verify"),
        )
        found = [
            f"{option_name(name)} needs {what}"
            for name, met, what in needs
            if getattr(self, name) is not None and not met
        ]
        try:
            _ = self.renames
        except ValueError as error:
            found.append(f"--rename {error}")
        return found

    @property
    def datasets(self) -> tuple[NamedDataset, ...]:
        """The datasets of --dataset, in the order of the list."""
        return () if self.dataset is None else parse_datasets(self.dataset)

    @property
    def renames(self) -> dict[str, str]:
        """The policy's name for each feature that the dataset calls differently."""
        return {} if self.rename is None else parse_renames(self.rename)

    @property
    def rows_to_run(self) -> int:
        """Over how many rows the teacher runs again."""
        if not self.verify:
            return 0
        return VERIFY_ROWS if self.verify_rows is None else self.verify_rows
