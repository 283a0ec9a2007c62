"""Settings of `craft train` and `craft dryrun`."""

from dataclasses import dataclass
from pathlib import Path
from typing import override

from craftcli.choices import Amp, Anchors, LrSchedule, Mode, Parallel, Teacher, Tracker
from craftcli.config.dataset_list import NamedDataset, list_problems, parse_datasets
from craftcli.config.parsing import LoraSpec, parse_lora
from craftcli.config.policy_and_data import PolicyAndData
from craftcli.config.retention import (
    FEWEST_ANCHORS,
    SAMPLES_PER_ANCHOR,
    SAMPLES_PER_VARIATION,
    RetentionConfig,
)
from craftcli.config.retention import PANEL as RETENTION
from craftcli.config.settings import Effect, option_name, setting
from craftcli.locations import RemotePath

DEFAULT_CACHE = Path("anchors.zarr")
"""The cache that is used if it exists and no other is named."""

_ANCHORS = "Anchors"
_OPTIMIZATION = "Optimization"
_MEASURING = "Measuring while training"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RetentionConfig, PolicyAndData):
    """Settings of `craft train` and `craft dryrun`."""

    cache: Path | RemotePath = setting(
        DEFAULT_CACHE,
        "Cache with the anchors: a folder or a URL. Without one, see --anchors.",
        panel=RETENTION,
    )
    anchors: Anchors = setting(
        Anchors.AUTO,
        "auto takes the anchors from --cache; without a cache, the run makes its own and keeps "
        "them beside its folder. cache never makes any.",
        panel=_ANCHORS,
    )
    teacher: Teacher = setting(
        Teacher.CACHED,
        "cached compares with the answers that a cache holds. live asks the teacher itself, with "
        "new anchors at every step and no cache: one more forward pass a step, and a copy of the "
        "policy in memory unless LoRA weights are trained.",
        panel=_ANCHORS,
    )
    old_tasks: str | None = setting(
        None,
        "Instructions of old tasks: a text file with one per line, or a LeRobot dataset, whose "
        "frames are not read. New frames under these instructions become anchors.",
        metavar="SOURCE",
        panel=_ANCHORS,
    )
    old_dataset: str | tuple[str, ...] | None = setting(
        None,
        "Data of old tasks, to make anchors of: a folder or a Hub name, or several as in "
        "--dataset. A few frames are enough: they are varied.",
        metavar="DATA",
        panel=_ANCHORS,
    )
    old_dataset_root: str | None = setting(
        None,
        "Folder of --old-dataset, when it is not in LeRobot's cache under its Hub name.",
        metavar="FOLDER",
        panel=_ANCHORS,
    )
    old_env: str | None = setting(
        None,
        "Environments of old tasks, as in craft eval --env, such as metaworld:reach-v3; several "
        "with commas. The policy acts there, and the frames that it sees become anchors.",
        metavar="ENV",
        panel=_ANCHORS,
    )
    old_env_episodes: int | None = setting(
        None,
        "Episodes in each environment of --old-env. Default: 20.",
        low=1,
        panel=_ANCHORS,
    )
    anchor_samples: int | None = setting(
        None,
        "About how many anchors to make. Default: 512 frames of data, 1024 if they are varied "
        "(diffusion: 4096), 4096 states from statistics.",
        low=1,
        panel=_ANCHORS,
    )
    anchor_root: str | None = setting(
        None,
        "Folder of the anchors' dataset, when it has moved since the cache was built.",
        metavar="FOLDER",
        panel=RETENTION,
        effect=Effect.COMPUTING,
    )
    other_student: bool = setting(
        False,
        "Allow a student that is not the cache's teacher. L_ret then starts above 0.",
        panel=RETENTION,
    )
    freeze_downstream: bool | None = setting(
        None,
        "Freeze the parameters after the deepest retained layer, which could drift otherwise. "
        "Default: freeze them if nothing else holds them and they are at most a fifth of what is "
        "trained.",
        panel=RETENTION,
    )
    output: Path | None = setting(
        None,
        "Folder of the run. Default: runs/<date>-<time>-<mode>.",
        aliases=("-o", "--output_dir"),
        effect=Effect.PLACE,
    )
    overwrite: bool = setting(False, "Replace an existing run.", effect=Effect.PLACE)
    resume: Path | None = setting(
        None,
        "Continue this run from its last checkpoint, with its own settings. With --steps it ends "
        "earlier or later than planned.",
        metavar="RUN",
        effect=Effect.COMPUTING,
    )
    from_: int | None = setting(
        None,
        "With --resume: start from the checkpoint of this step instead of the last. What came "
        "after it is set aside within the run.",
        low=0,
        metavar="STEP",
        effect=Effect.COMPUTING,
    )
    accept_changes: bool = setting(
        False,
        "With --resume: continue even if the checkpoint, the data or the cache is not what it was.",
        effect=Effect.COMPUTING,
    )
    steps: int = setting(10_000, "Number of optimizer steps.", low=1)
    batch_size: int = setting(
        8,
        "Samples of the new task per step and process. Lower it when memory is short.",
        low=1,
        aliases=("--batch_size",),
    )
    lr: float | None = setting(
        None,
        "Peak learning rate. Default: the policy's preset.",
        above=0,
        panel=_OPTIMIZATION,
    )
    lr_schedule: LrSchedule = setting(
        LrSchedule.PRESET,
        "How the learning rate changes: by the policy's preset, not at all, or from its peak to 0 "
        "in a cosine over the run.",
        panel=_OPTIMIZATION,
    )
    amp: Amp = setting(
        Amp.OFF,
        "Compute forward passes in lower precision, to save time and memory on a GPU.",
        panel=_OPTIMIZATION,
    )
    gradient_checkpointing: bool = setting(
        False,
        "Save memory: recompute layers in the backward pass instead of keeping their outputs.",
        panel=_OPTIMIZATION,
    )
    parallel: Parallel = setting(
        Parallel.DDP,
        "Under torchrun, give every process the whole policy, or (fsdp) a part of it.",
        panel=_OPTIMIZATION,
    )
    lora: str | None = setting(
        None,
        "Train LoRA weights instead of the policy's own, as in r=8,alpha=16,targets=q_proj;v_proj.",
        metavar="SPEC",
        panel=_OPTIMIZATION,
    )
    insulate: bool = setting(
        False,
        "Knowledge insulation: train the action expert only, so that no gradient of the task "
        "reaches the vision-language model. For pi0, pi05 and smolvla.",
        panel=_OPTIMIZATION,
    )
    tracker: Tracker = setting(
        Tracker.NONE,
        "Send metrics to this tracker as well as to metrics.jsonl.",
        effect=Effect.PLACE,
    )
    workers: int = setting(
        0,
        "Processes that read the dataset; 0 reads it in the training process.",
        low=0,
        aliases=("--num_workers",),
        effect=Effect.COMPUTING,
    )
    log_every: int = setting(
        10, "Steps between log lines.", low=1, aliases=("--log_freq",), effect=Effect.COMPUTING
    )
    save_every: int = setting(
        5_000,
        "Steps between checkpoints; 0 saves the last one only.",
        low=0,
        aliases=("--save_freq",),
        effect=Effect.COMPUTING,
    )

    keep_last: int = setting(
        0,
        "Keep only the last N checkpoints, and the best; 0 keeps all.",
        low=0,
        effect=Effect.COMPUTING,
    )
    eval_every: int = setting(
        0,
        "Steps between measurements of the policy: the retention loss on anchors (held-out "
        "ones with --held-out-share), the loss on new data, and success in --eval-env. 0 measures "
        "nothing. Measuring does not change the weights.",
        low=0,
        panel=_MEASURING,
        effect=Effect.COMPUTING,
    )
    eval_dataset: str | None = setting(
        None,
        "Held-out data of the new task: a folder or a Hub name. Default: frames of --dataset, "
        "which are trained on.",
        metavar="DATA",
        panel=_MEASURING,
        effect=Effect.COMPUTING,
    )
    eval_env: str | None = setting(
        None,
        "Environments of the new task, as in craft eval --env; several with commas.",
        metavar="ENV",
        panel=_MEASURING,
        effect=Effect.COMPUTING,
    )
    eval_old_env: str | None = setting(
        None,
        "Environments of old tasks; several with commas.",
        metavar="ENV",
        panel=_MEASURING,
        effect=Effect.COMPUTING,
    )
    eval_episodes: int = setting(
        10,
        "Episodes in each of these environments.",
        low=1,
        panel=_MEASURING,
        effect=Effect.COMPUTING,
    )
    patience: int = setting(
        0,
        "Stop early after N measurements in a row without a new best; 0 never stops.",
        low=0,
        panel=_MEASURING,
        effect=Effect.COMPUTING,
    )

    def anchors_a_step(
        self, samples_per_anchor: int = SAMPLES_PER_ANCHOR, *, varied: bool = False
    ) -> int:
        """Anchors per retention step and process, if there is one for so many samples of the task.

        `varied` says whether they are variations of frames.
        """
        if self.anchor_batch_size is not None:
            return self.anchor_batch_size
        if varied:
            samples_per_anchor = min(samples_per_anchor, SAMPLES_PER_VARIATION)
        return max(FEWEST_ANCHORS, self.batch_size // samples_per_anchor)

    @property
    def lora_spec(self) -> LoraSpec | None:
        """The LoRA weights to train, or None to train the policy's own weights."""
        return None if self.lora is None else parse_lora(self.lora)

    @override
    def problems(self) -> list[str]:
        found = super().problems()
        try:
            _ = self.lora_spec
        except ValueError as error:
            found.append(f"--lora {error}")
        found += self._anchor_problems() + self._live_problems()
        if self.resume is None:
            needing = [name for name in ("from_", "accept_changes") if getattr(self, name)]
            found += [f"{option_name(name)} needs --resume" for name in needing]
        found += self._measuring_problems()
        if self.freeze_downstream and Mode.HIDDEN not in self.modes:
            found.append("--freeze-downstream needs a --mode with hidden")
        if self.parallel is Parallel.FSDP:
            weights = [mode for mode in (Mode.L2SP, Mode.EWC) if mode in self.modes]
            found += [f"--parallel fsdp does not work with --mode {mode}" for mode in weights]
            if self.amp is Amp.FP16:
                found.append("--parallel fsdp does not work with --amp fp16")
        return found

    def _measuring_problems(self) -> list[str]:
        if self.eval_every:
            if self.parallel is Parallel.FSDP:
                return ["--eval-every does not work with --parallel fsdp"]
            return []
        names = ("eval_dataset", "eval_env", "eval_old_env", "patience")
        return [f"{option_name(name)} needs --eval-every" for name in names if getattr(self, name)]

    @property
    def asks_teacher(self) -> bool:
        """Whether the teacher answers at every step, so that no cache is needed."""
        return self.teacher is Teacher.LIVE and self.uses_anchors

    def _live_problems(self) -> list[str]:
        if self.teacher is not Teacher.LIVE:
            return []
        live = "--teacher live"
        found = [
            f"{live} does not work with --mode {mode}, which needs the labels of old data"
            for mode in (Mode.REPLAY, Mode.EWC)
            if mode in self.modes
        ]
        if self.parallel is Parallel.FSDP:
            found.append(f"{live} does not work with --parallel fsdp")
        if self.anchors is Anchors.CACHE:
            found.append(f"{live} needs --anchors auto, which makes anchors")
        if self.old_env is not None:
            found.append(f"{live} does not work with --old-env, whose episodes are recorded once")
        if self.held_out_share:
            found.append(f"--held-out-share has no effect with {live}: every anchor is new")
        if self.other_student:
            found.append(
                f"--other-student cannot be combined with {live}: the policy's own start "
                "is the teacher"
            )
        return found

    @property
    def asked_anchors(self) -> tuple[str, ...]:
        """Names of the settings that were given and say what to make anchors of."""
        names = ("old_tasks", "old_dataset", "old_env", "anchor_samples")
        return tuple(name for name in names if getattr(self, name) is not None)

    @property
    def old_datasets(self) -> tuple[NamedDataset, ...]:
        """The datasets of --old-dataset, in the order of the list."""
        return () if self.old_dataset is None else parse_datasets(self.old_dataset)

    def _anchor_problems(self) -> list[str]:
        alone = {"--old-dataset-root": self.old_dataset_root}
        found = list_problems("--old-dataset", self.old_dataset, alone=alone)
        if self.anchors is Anchors.CACHE:
            found += [
                f"{option_name(name)} needs --anchors auto, which makes anchors"
                for name in self.asked_anchors
            ]
        if self.old_tasks is not None and self.old_dataset is not None:
            found.append("--old-tasks has no effect with --old-dataset, which has instructions")
        if self.old_dataset_root is not None and self.old_dataset is None:
            found.append("--old-dataset-root needs --old-dataset")
        if self.old_env_episodes is not None and self.old_env is None:
            found.append("--old-env-episodes needs --old-env")
        if self.old_env is not None:
            if not self.old_env.strip(" ,"):
                found.append("--old-env names no environment")
            found += [
                f"{option_name(name)} cannot be combined with --old-env"
                for name in ("old_tasks", "old_dataset")
                if getattr(self, name) is not None
            ]
        return found
