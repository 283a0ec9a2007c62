"""The settings of every command; what they mean is said by their help texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, override

from craftcli.choices import (
    Images,
    LossKind,
    Merge,
    Mode,
    Pooling,
    Sampling,
    Schedule,
    StoreDtype,
)
from craftcli.settings import Settings, option_name, setting

DEFAULT_EPSILON = 0.02
"""Two hundredths of the teacher's variance may drift: kept behaviour in the demo's measurements."""

DEMO = "demo"
"""The name of the built-in policy and of its datasets."""


@dataclass(frozen=True, kw_only=True)
class PolicyAndData(Settings):
    """Where the policy and the data come from."""

    policy: str = setting(
        DEMO,
        "LeRobot checkpoint: a folder, a run or a Hub name.",
        aliases=("--policy.path",),
        panel="Policy and data",
    )
    revision: str | None = setting(
        None, "Revision of a policy on the Hub.", panel="Policy and data"
    )
    dataset: str = setting(
        DEMO,
        "LeRobotDataset: a folder or a Hub name.",
        aliases=("--dataset.repo_id",),
        panel="Policy and data",
    )
    dataset_root: str | None = setting(
        None,
        "Folder of the dataset when it is not under its Hub name.",
        aliases=("--dataset.root",),
        panel="Policy and data",
    )
    dataset_revision: str | None = setting(
        None,
        "Revision of a dataset on the Hub.",
        aliases=("--dataset.revision",),
        panel="Policy and data",
    )
    device: str = setting("auto", "cpu, cuda, cuda:1, mps, or auto.")
    seed: int = setting(0, "Seed of everything random.", low=0)

    def problems(self) -> list[str]:
        """The demo comes whole: its policy on other data, or the reverse, fits nothing."""
        if (self.policy == DEMO) != (self.dataset == DEMO):
            missing = "dataset" if self.dataset == DEMO else "policy"
            return [f"--{missing} is needed when the other of --policy and --dataset is given"]
        ignored = ("revision", "dataset_root", "dataset_revision") if self.is_demo else ()
        return [
            f"{option_name(name)} needs --policy and --dataset; the demo has none"
            for name in ignored
            if getattr(self, name) is not None
        ]

    @classmethod
    @override
    def wants_demo(cls, chosen: Mapping[str, Any]) -> bool:
        return bool(chosen.get("policy", DEMO) == DEMO)

    @property
    def is_demo(self) -> bool:
        """Whether the built-in policy and datasets are used."""
        return self.policy == DEMO


@dataclass(frozen=True, kw_only=True)
class CacheConfig(PolicyAndData):
    """Settings of `craft cache build`."""

    output: Path = setting(
        Path("anchors.zarr"), "Where the cache is written.", aliases=("-o", "--output_dir")
    )
    overwrite: bool = setting(False, "Replace an existing cache once the new one is whole.")
    resume: bool = setting(False, "Go on with a build that was interrupted.")
    samples: int = setting(512, "How many anchor samples to store.", low=1, panel="Anchors")
    sampling: Sampling = setting(
        Sampling.UNIFORM, "Frames at random, or balanced over episodes or tasks.", panel="Anchors"
    )
    episodes: str | None = setting(
        None, "Only these episodes, as in 0-9,12.", aliases=("--dataset.episodes",), panel="Anchors"
    )
    indices: str | None = setting(
        None,
        "Exactly these frames: a list as in 0-9,12, or a file with one a line.",
        panel="Anchors",
    )
    prompts: Path | None = setting(
        None,
        "File of instructions to vary the rows' own by, one a line; {task} is the row's own.",
        panel="Anchors",
    )
    images: Images = setting(
        Images.REFERENCE,
        "Images stay in the dataset and are read again from it, or go into the file.",
        panel="Anchors",
    )
    layers: str | None = setting(
        None,
        "Layers by index, -1 is the last, as in -2,-1. Without it: the policy family's default.",
        panel="Anchors",
    )
    stack: str | None = setting(None, "Which stack of layers, such as vlm.", panel="Anchors")
    pooling: Pooling | None = setting(
        None, "Which tokens are kept, and how. Without it: the family's default.", panel="Anchors"
    )
    dtype: StoreDtype = setting(
        StoreDtype.AUTO, "Precision of the stored states; auto is the teacher's.", panel="Anchors"
    )
    batch_size: int = setting(
        32, "Samples the teacher sees at once.", low=1, aliases=("--batch_size",)
    )
    chunk_mib: float = setting(
        16.0, "Size of a chunk: what is read, checked and resumed as a whole.", above=0
    )


@dataclass(frozen=True, kw_only=True)
class RetentionConfig(Settings):
    """How the student is held to its teacher."""

    mode: Mode = setting(Mode.HIDDEN, "What is retained.", panel="Retention")
    loss: LossKind = setting(
        LossKind.NMSE,
        "Distance to the teacher; nmse is the share of the teacher's variance that drifted.",
        panel="Retention",
    )
    anchor_batch_size: int = setting(16, "Anchors in a retention step.", low=1, panel="Retention")
    retention_every: int = setting(
        1,
        "K: a retention step every K steps; more is cheaper and holds less.",
        low=1,
        panel="Retention",
    )
    project: bool = setting(
        True, "Remove the part of the task gradient that undoes retention.", panel="Retention"
    )
    conflict_threshold: float = setting(
        -0.1, "Project when the cosine is below this.", low=-1, high=1, panel="Retention"
    )
    merge: Merge = setting(Merge.WEIGHTED, "How the gradients are added.", panel="Retention")
    lambda_init: float = setting(1.0, "First value of λ.", low=0, panel="Retention")
    lambda_lr: float = setting(0.1, "Step size of λ.", low=0, panel="Retention")
    lambda_max: float = setting(10.0, "Upper bound of λ.", low=0, panel="Retention")
    epsilon_start: float | None = setting(
        None,
        "Budget ε, or where it starts, in units of the loss. Without it: 0.02, for nmse.",
        low=0,
        panel="Retention",
    )
    epsilon_end: float | None = setting(
        None, "Where ε ends, under a schedule that moves it.", low=0, panel="Retention"
    )
    epsilon_schedule: Schedule = setting(
        Schedule.CONSTANT, "How ε moves from start to end.", panel="Retention"
    )

    def problems(self) -> list[str]:
        """Values that do not go together."""
        found = super().problems()
        if self.lambda_init > self.lambda_max:
            found.append("--lambda-init is above --lambda-max")
        other_scale = self.mode is not Mode.NONE and self.loss is not LossKind.NMSE
        if self.epsilon_start is None and other_scale:
            found.append(f"--loss {self.loss} needs --epsilon-start, because its scale is its own")
        moves = self.epsilon_schedule is not Schedule.CONSTANT
        if moves and self.epsilon_end is None:
            found.append(f"--epsilon-schedule {self.epsilon_schedule} needs --epsilon-end")
        if not moves and self.epsilon_end is not None:
            found.append("--epsilon-end needs an --epsilon-schedule that moves ε")
        if self.epsilon_schedule is Schedule.EXPONENTIAL and 0 in self.budget:
            found.append("an exponential schedule needs --epsilon-start and --epsilon-end above 0")
        return found

    @property
    def budget(self) -> tuple[float, float]:
        """ε at the start and at the end."""
        start = DEFAULT_EPSILON if self.epsilon_start is None else self.epsilon_start
        return start, start if self.epsilon_end is None else self.epsilon_end


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RetentionConfig, PolicyAndData):
    """Settings of `craft train` and `craft dryrun`."""

    cache: Path = setting(Path("anchors.zarr"), "The anchor cache.", panel="Retention")
    anchor_root: str | None = setting(
        None,
        "Folder of the anchors' dataset, when it is no longer where the cache was built.",
        panel="Retention",
    )
    other_student: bool = setting(
        False,
        "Train a student that is not the cache's teacher; L_ret then starts above 0.",
        panel="Retention",
    )
    freeze_downstream: bool = setting(
        False,
        "Freeze what lies behind the deepest retained layer, which is otherwise free to drift.",
        panel="Retention",
    )
    output: Path | None = setting(
        None,
        "Folder of the run. Without it: runs/<date>-<time>-<mode>.",
        aliases=("-o", "--output_dir"),
    )
    overwrite: bool = setting(False, "Replace an existing run.")
    steps: int = setting(10_000, "Optimizer steps.", low=1)
    batch_size: int = setting(
        8, "Samples of the new task in a step.", low=1, aliases=("--batch_size",)
    )
    lr: float | None = setting(
        None, "Peak learning rate. Without it: the policy's own preset.", above=0
    )
    workers: int = setting(0, "Processes that read the dataset.", low=0, aliases=("--num_workers",))
    log_every: int = setting(10, "Steps between log lines.", low=1, aliases=("--log_freq",))
    save_every: int = setting(
        5_000, "Steps between checkpoints; 0 saves only the last.", low=0, aliases=("--save_freq",)
    )

    def problems(self) -> list[str]:
        """Values that do not go together."""
        found = super().problems()
        if self.freeze_downstream and self.mode is Mode.NONE:
            found.append("--freeze-downstream needs a --mode that retains something")
        return found
