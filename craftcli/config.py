"""The settings of every command; what they mean is said by their help texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, override

from craftcli.choices import (
    ActionSource,
    Amp,
    Constraints,
    Controller,
    Images,
    Kind,
    Layout,
    LossKind,
    LrSchedule,
    Merge,
    Mode,
    Parallel,
    Pooling,
    ProjectWhen,
    Sampling,
    Schedule,
    StoreDtype,
    SurgeryScope,
    Tracker,
)
from craftcli.locations import RemotePath
from craftcli.lora import LoraSpec, parse_lora
from craftcli.renames import parse_renames
from craftcli.settings import Settings, option_name, setting

DEFAULT_EPSILON = 0.02
"""Two hundredths of the teacher's variance may drift: kept behaviour in the demo's measurements."""

JOINED = "+"
"""Joins several modes or kinds, as in hidden+action."""

DEMO = "demo"
"""The name of the built-in policy and of its datasets."""


def split_joined[E: StrEnum](text: str, choices: type[E]) -> tuple[E, ...]:
    """The choices that a text such as hidden+action names, in the order of their class."""
    named = text.split(JOINED)
    return tuple(choice for choice in choices if choice in named)


def joined_problems(option: str, text: str, choices: type[StrEnum]) -> list[str]:
    """What is wrong with a text such as hidden+action."""
    named = text.split(JOINED)
    unknown = [name for name in named if name not in list(choices)]
    if unknown:
        return [f"{option} has {unknown[0]!r}, not one of {', '.join(choices)}"]
    return [f"{option} {text} names one twice"] if len(set(named)) < len(named) else []


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
    rename: str | None = setting(
        None,
        "The dataset's names for what the policy calls otherwise, as in "
        "observation.images.cam=observation.images.top; several with commas.",
        panel="Policy and data",
    )
    trust_remote_code: bool = setting(
        False,
        "Run Python code that comes with the policy's tokenizers.",
        panel="Policy and data",
    )
    device: str = setting("auto", "cpu, cuda, cuda:1, mps, or auto.")
    seed: int = setting(0, "Seed of everything random.", low=0)

    def problems(self) -> list[str]:
        """The demo comes whole: its policy on other data, or the reverse, fits nothing."""
        if (self.policy == DEMO) != (self.dataset == DEMO):
            missing = "dataset" if self.dataset == DEMO else "policy"
            return [f"--{missing} is needed when the other of --policy and --dataset is given"]
        names = ("revision", "dataset_root", "dataset_revision", "rename")
        found = [
            f"{option_name(name)} needs --policy and --dataset; the demo has none"
            for name in (names if self.is_demo else ())
            if getattr(self, name) is not None
        ]
        try:
            _ = self.renames
        except ValueError as error:
            found.append(f"--rename {error}")
        return found

    @property
    def renames(self) -> dict[str, str]:
        """The policy's name for each name of the dataset that differs."""
        return {} if self.rename is None else parse_renames(self.rename)

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

    output: Path | RemotePath = setting(
        Path("anchors.zarr"),
        "Where the cache is written: a folder, or s3://, gs://, hf://.",
        aliases=("-o", "--output_dir"),
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
    exclude: Path | RemotePath | None = setting(
        None,
        "Only frames that this other cache of the same dataset does not have: held-out anchors.",
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
    kind: str | None = setting(
        None,
        "What is stored, for the modes of the same names: hidden, action, token_ce, or several as "
        "in hidden+token_ce. Without it: hidden+action, or hidden for a policy without an adapter.",
        panel="Anchors",
    )
    actions: ActionSource = setting(
        ActionSource.TEACHER,
        "Where the policy takes actions in: the teacher's own, or the data's labels.",
        panel="Anchors",
    )
    top_k: int = setting(
        32, "How many of a token's most likely values --kind action keeps.", low=1, panel="Anchors"
    )
    layers: str | None = setting(
        None,
        "Layers by index, -1 is the last, as in -2,-1. Without it: the policy family's default.",
        panel="Anchors",
    )
    stack: str | None = setting(
        None,
        "Which stack of layers: a name such as vlm, or the path of any list of layers in the "
        "policy, such as model.encoder.layers.",
        panel="Anchors",
    )
    layout: Layout | None = setting(
        None,
        "How the states of a stack lie that is given by its path: b the batch, s tokens, d "
        "numbers. Without it: found by their shape.",
        panel="Anchors",
    )
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

    def problems(self) -> list[str]:
        """Values that do not go together."""
        found = super().problems()
        if self.kind is not None:
            found += joined_problems("--kind", self.kind, Kind)
        if self.exclude is not None and self.indices is not None:
            found.append("--indices names every frame, so that --exclude has nothing to say")
        if self.layout is not None and "." not in (self.stack or ""):
            found.append("--layout needs a --stack that is a path, such as model.encoder.layers")
        if Kind.TOKEN_CE in self.kinds and self.actions is ActionSource.DATA:
            found.append("--kind token_ce stores the teacher's own tokens: --actions data is none")
        if not found and self.kinds and Kind.HIDDEN not in self.kinds:
            found += [
                f"{option_name(name)} needs --kind hidden"
                for name in ("layers", "stack", "layout", "pooling")
                if getattr(self, name) is not None
            ]
        return found

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What is stored; nothing where the policy family is to decide."""
        return () if self.kind is None else split_joined(self.kind, Kind)


@dataclass(frozen=True, kw_only=True)
class RetentionConfig(Settings):
    """How the student is held to its teacher."""

    mode: str = setting(
        "hidden+action",
        "What is retained: hidden (states), action (outputs), token_ce (tokens), replay (old "
        "labels), l2sp, ewc (weights), none, or several as in hidden+action.",
        panel="Retention",
    )
    loss: LossKind = setting(
        LossKind.NMSE,
        "Distance to the teacher; nmse is the share of the teacher's variance that drifted.",
        panel="Retention",
    )
    anchor_batch_size: int = setting(
        16, "Anchors in a retention step of one process.", low=1, panel="Retention"
    )
    retention_every: int = setting(
        1,
        "K: a retention step every K steps; more is cheaper and holds less.",
        low=1,
        panel="Retention",
    )
    grad_accum: int = setting(
        1, "Batches, of the task and of anchors, whose gradients make one step.", low=1
    )
    surgery: SurgeryScope = setting(
        SurgeryScope.GLOBAL,
        "Remove the part of the task gradient that undoes retention: decided over all parameters, "
        "per layer, per optimizer group, or never.",
        panel="Retention",
    )
    conflict_threshold: float = setting(
        -0.1, "Project when the cosine is below this.", low=-1, high=1, panel="Retention"
    )
    project_when: ProjectWhen = setting(
        ProjectWhen.VIOLATED,
        "Project only while L_ret is above ε, which uses the budget up, or in every conflict, "
        "which holds more and learns less.",
        panel="Retention",
    )
    merge: Merge = setting(Merge.WEIGHTED, "How the gradients are added.", panel="Retention")
    constraints: Constraints = setting(
        Constraints.JOINT, "Several modes under one budget and λ, or one each.", panel="Retention"
    )
    fisher_samples: int = setting(
        256, "Anchors from which ewc learns which weights matter.", low=1, panel="Retention"
    )
    controller: Controller = setting(
        Controller.ASCENT, "How λ follows the violation of the budget.", panel="Controller"
    )
    lambda_init: float = setting(1.0, "First value of λ.", low=0, panel="Controller")
    lambda_lr: float = setting(0.1, "Step size of λ.", low=0, panel="Controller")
    lambda_max: float = setting(10.0, "Upper bound of λ.", low=0, panel="Controller")
    lambda_kp: float = setting(
        1.0, "Proportional gain of --controller nupi.", low=0, panel="Controller"
    )
    lambda_nu: float = setting(
        0.0, "How much --controller nupi smooths.", above=-1, high=0.999, panel="Controller"
    )
    lambda_warmup: int = setting(
        0, "Retention steps over which λ comes into force.", low=0, panel="Controller"
    )
    epsilon_start: float | None = setting(
        None,
        "Budget ε, or where it starts, in units of the loss. Without it: 0.02 for shares of the "
        "teacher's variance and for the divergence of tokens, which --mode action holds.",
        low=0,
        panel="Controller",
    )
    epsilon_end: float | None = setting(
        None, "Where ε ends, under a schedule that moves it.", low=0, panel="Controller"
    )
    epsilon_schedule: Schedule | None = setting(
        None,
        "How ε moves from start to end; auto finds it in the first steps. Without it: constant, or "
        "auto for losses whose scale is their own.",
        panel="Controller",
    )

    def problems(self) -> list[str]:
        """Values that do not go together."""
        found = super().problems() + joined_problems("--mode", self.mode, Mode)
        if Mode.NONE in self.modes and len(self.modes) > 1:
            found.append("--mode none goes with no other")
        if self.lambda_init > self.lambda_max:
            found.append("--lambda-init is above --lambda-max")
        moves = self.schedule not in (Schedule.CONSTANT, Schedule.AUTO)
        if moves and self.epsilon_end is None:
            found.append(f"--epsilon-schedule {self.epsilon_schedule} needs --epsilon-end")
        if not moves and self.epsilon_end is not None:
            found.append("--epsilon-end needs an --epsilon-schedule that moves ε")
        if self.schedule is Schedule.AUTO and self.epsilon_start is not None:
            found.append("--epsilon-start is not used by --epsilon-schedule auto")
        if moves and self.epsilon_start is None and not self.scale_known:
            found.append(f"--epsilon-schedule {self.epsilon_schedule} needs --epsilon-start here")
        if self.schedule is Schedule.EXPONENTIAL and 0 in self.budget:
            found.append("an exponential schedule needs --epsilon-start and --epsilon-end above 0")
        return found

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What is retained; the one mode `none` means nothing."""
        return split_joined(self.mode, Mode)

    @property
    def retains(self) -> bool:
        """Whether anything is retained."""
        return self.modes != (Mode.NONE,)

    @property
    def uses_anchors(self) -> bool:
        """Whether anything is retained on the rows of a cache."""
        return not {Mode.NONE, Mode.L2SP}.issuperset(self.modes)

    @property
    def scale_known(self) -> bool:
        """Whether a loss of 0.02 means the same for every policy."""
        relative = {Mode.HIDDEN, Mode.ACTION, Mode.NONE}
        return self.loss is LossKind.NMSE and relative.issuperset(self.modes)

    @property
    def schedule(self) -> Schedule:
        """How ε moves, decided."""
        if self.epsilon_schedule is not None:
            return self.epsilon_schedule
        known = self.scale_known or self.epsilon_start is not None
        return Schedule.CONSTANT if known else Schedule.AUTO

    @property
    def budget(self) -> tuple[float, float]:
        """ε at the start and at the end."""
        start = DEFAULT_EPSILON if self.epsilon_start is None else self.epsilon_start
        return start, start if self.epsilon_end is None else self.epsilon_end


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RetentionConfig, PolicyAndData):
    """Settings of `craft train` and `craft dryrun`."""

    cache: Path | RemotePath = setting(
        Path("anchors.zarr"), "The anchor cache: a folder or a URL.", panel="Retention"
    )
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
    resume: Path | None = setting(
        None, "Go on with this run from its last checkpoint; it needs no other option."
    )
    steps: int = setting(10_000, "Optimizer steps.", low=1)
    batch_size: int = setting(
        8, "Samples of the new task in a step.", low=1, aliases=("--batch_size",)
    )
    lr: float | None = setting(
        None, "Peak learning rate. Without it: the policy's own preset.", above=0
    )
    lr_schedule: LrSchedule = setting(
        LrSchedule.PRESET,
        "How the learning rate moves: as the policy's preset has it, not at all, or from its peak "
        "to 0 in a cosine over the run.",
    )
    amp: Amp = setting(Amp.OFF, "Lower precision for forward passes.")
    gradient_checkpointing: bool = setting(
        False, "Compute layers again in the backward pass, to save memory."
    )
    parallel: Parallel = setting(
        Parallel.DDP, "Under torchrun: every process holds the policy, or a part of it."
    )
    lora: str | None = setting(
        None,
        "Train low-rank adapters instead of the weights, as in r=8,alpha=16,targets=q_proj;v_proj.",
    )
    tracker: Tracker = setting(Tracker.NONE, "Where metrics go besides metrics.jsonl.")
    workers: int = setting(0, "Processes that read the dataset.", low=0, aliases=("--num_workers",))
    log_every: int = setting(10, "Steps between log lines.", low=1, aliases=("--log_freq",))
    save_every: int = setting(
        5_000, "Steps between checkpoints; 0 saves only the last.", low=0, aliases=("--save_freq",)
    )

    @property
    def adapters(self) -> LoraSpec | None:
        """The adapters to train, if not the weights."""
        return None if self.lora is None else parse_lora(self.lora)

    def problems(self) -> list[str]:
        """Values that do not go together."""
        found = super().problems()
        try:
            _ = self.adapters
        except ValueError as error:
            found.append(f"--lora {error}")
        if self.freeze_downstream and Mode.HIDDEN not in self.modes:
            found.append("--freeze-downstream needs a --mode with hidden")
        if self.parallel is Parallel.FSDP:
            weights = [mode for mode in (Mode.L2SP, Mode.EWC) if mode in self.modes]
            found += [f"--parallel fsdp does not go with --mode {mode}" for mode in weights]
            if self.amp is Amp.FP16:
                found.append("--parallel fsdp does not go with --amp fp16")
        return found
