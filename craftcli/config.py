"""Settings of the commands: frozen, validated at once, each knowing where its value came from."""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

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
from craftcli.errors import EXIT_USAGE, CraftError

DEFAULT_EPSILON = 0.02
"""Two hundredths of the teacher's variance may drift: kept behaviour in the demo's measurements."""

DEMO = "demo"
"""The name of the built-in policy and of its datasets."""


def setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    aliases: tuple[str, ...] = (),
    panel: str = "Run",
) -> Any:
    """A field that the command line offers as an option; `low` and `high` are still allowed."""
    bounds = {"low": low, "high": high, "above": above}
    return dataclasses.field(
        default=default,
        metadata={"help": help, "aliases": aliases, "panel": panel, **bounds},
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the commands' settings."""

    def __post_init__(self) -> None:
        problems = [*_out_of_bounds(self), *self.problems()]
        if problems:
            raise CraftError(
                "These settings cannot be used.",
                why=" ".join(f"{problem}." for problem in problems),
                fix="correct them on the command line or in the --config file.",
                exit_code=EXIT_USAGE,
            )

    def problems(self) -> list[str]:
        """What is wrong beyond the bounds of single values."""
        return []

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {name: _plain(getattr(self, name)) for name in self.names()}


@dataclass(frozen=True, kw_only=True)
class Source[S: Settings]:
    """Settings and, for each of them, who decided it: flag, file, demo or default."""

    settings: S
    origin: Mapping[str, str]


def resolve[S: Settings](
    cls: type[S],
    *,
    flags: Mapping[str, Any],
    file: Path | None = None,
    demo: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Source[S]:
    """Settings from the command line, else the command's own, else the file's, else the demo's.

    What nobody decided keeps the default of its field.
    """
    written = _read_file(file, cls) if file else {}
    given = {name: value for name, value in flags.items() if value is not None}
    for_demo = demo if demo and _is_demo(cls, {**written, **given}) else {}
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    # A command's own values beat the file: a rehearsal of three steps stays one.
    ranked = (("demo", for_demo), ("file", written), ("default", defaults or {}), ("flag", given))
    for name in cls.names():
        origin[name] = "default"
        for where, chosen in ranked:
            if name in chosen:
                values[name], origin[name] = chosen[name], where
    return Source(settings=cls(**values), origin=origin)


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


def _is_demo(cls: type[Settings], chosen: Mapping[str, Any]) -> bool:
    return issubclass(cls, PolicyAndData) and chosen.get("policy", DEMO) == DEMO


def _out_of_bounds(settings: Settings) -> list[str]:
    problems = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        low, high, above = (field.metadata[name] for name in ("low", "high", "above"))
        if not math.isfinite(value):
            problems.append(f"{option_name(field.name)} is {value}")
        elif low is not None and value < low:
            problems.append(f"{option_name(field.name)} is {value}, below {low:g}")
        elif above is not None and value <= above:
            problems.append(f"{option_name(field.name)} is {value}, not above {above:g}")
        elif high is not None and value > high:
            problems.append(f"{option_name(field.name)} is {value}, above {high:g}")
    return problems


def option_name(name: str) -> str:
    """How the command line spells a setting."""
    return "--" + name.replace("_", "-")


def _read_file(file: Path, cls: type[Settings]) -> dict[str, Any]:
    try:
        written = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CraftError(
            f"Cannot read the configuration {file}.",
            why=f"{error}.",
            fix="give --config a TOML file.",
            exit_code=EXIT_USAGE,
        ) from error
    names = {key: key.replace("-", "_") for key in written}
    unknown = [key for key, name in names.items() if name not in cls.names()]
    if unknown:
        hints = [_closest(key, cls.names()) for key in unknown]
        raise CraftError(
            f"Unknown settings in {file}: {', '.join(unknown)}.",
            why="this command has no such setting." + "".join(hints),
            fix="remove or correct them; --help lists the settings.",
            exit_code=EXIT_USAGE,
        )
    types = get_type_hints(cls)
    problems: list[str] = []
    values = {name: _typed(key, written[key], types[name], problems) for key, name in names.items()}
    if problems:
        raise CraftError(
            f"Some settings in {file} cannot be used.",
            why=" ".join(problems),
            fix="correct them in the file; --help lists the settings.",
            exit_code=EXIT_USAGE,
        )
    return values


def _closest(key: str, names: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), names, n=1)
    return f" Did you mean {near[0]} for {key}?" if near else ""


def _typed(key: str, value: Any, hint: Any, problems: list[str]) -> Any:
    """The value as the type of its setting, or a problem: a file cannot smuggle in another."""
    kind = next((k for k in get_args(hint) if k is not type(None)), hint)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and issubclass(kind, str | Path):
        try:
            return kind(value)
        except ValueError:
            choices = f"one of {', '.join(kind)}"
    else:
        choices = f"of type {kind.__name__}"
    problems.append(f"{key} is {value!r}, not {choices}.")
    return None


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
