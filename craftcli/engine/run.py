"""A training run from its settings to its first step.

`open_run` opens the policy, the data and the retention terms; `prepare` checks them. `craft dryrun`
calls the same steps one by one and reports each as a numbered check:

1. `open_policy_and_data`   the policy, the data of the new task
2. `with_own_anchors`       the anchors, if there is no cache
   `open_run_terms`         the cache and the terms of the retention loss
3. `check_start`            L_ret is 0 at the teacher's weights
4. `check_reach`            the retention gradient reaches what is trained; freezes what it must

`OpenedRun.trainer` then makes the trainer.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from craftcli.choices import Parallel
from craftcli.config.run_paths import absolute, record_paths
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.anchor_plan import AnchorPlan, plan_anchors
from craftcli.engine.checkpoint_manifest import require_unchanged_policy
from craftcli.engine.insulation import insulate
from craftcli.engine.own_anchors import OwnAnchors, Recorder, make_anchors, makes_anchors
from craftcli.engine.resuming import Resumed, read_run, verify_checkpoint
from craftcli.engine.retention.anchors import NumberedAnchors
from craftcli.engine.retention.gradient_reach import (
    GradientReach,
    find_reach,
    freeze,
    require_reach,
)
from craftcli.engine.retention.opening import open_live_anchors, open_terms
from craftcli.engine.retention.self_check import SelfCheck, require_self_check, self_check
from craftcli.engine.retention.terms import PROBE_ROWS, RetentionTerms
from craftcli.engine.run_folder import (
    check_output,
    claim_output,
    recover_lost_run,
    released_if_empty,
)
from craftcli.engine.sharding import describe_units
from craftcli.engine.trackers import require_tracker
from craftcli.engine.trainer import Trainer
from craftcli.engine.watch import Evaluator
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.locations import Location
from craftcli.policies.base import Batch
from craftcli.policies.identity import common_frames
from craftcli.policies.lerobot.action_range import describe_out_of_reach
from craftcli.policies.lerobot.apart_statistics import for_dataset, task_preprocessor
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.identity import identities
from craftcli.policies.lerobot.instructions import instructions_of_frames, reads_instructions
from craftcli.policies.lerobot.several_datasets import describe_frame_rates, parts_of
from craftcli.policies.lerobot.task_processors import (
    StatisticsChoice,
    fit_to,
    with_anchors_of,
    with_saved_teacher,
)
from craftcli.policies.lerobot.training import pipeline_config
from craftcli.sources import choose_device, old_instructions, open_student, open_task_data


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenedRun:
    """Everything that a run works on, open; nothing is trained or written yet."""

    config: TrainConfig
    output: Path
    processes: Processes
    student: Checkpoint
    dataset: Any
    """The data of the new task."""
    terms: RetentionTerms | None = None
    """None if nothing is retained."""
    resumed: Resumed | None = None
    makes_anchors: bool = False
    """Whether the run makes its own anchors, or finds them made by an earlier one."""
    own_anchors: OwnAnchors | None = None
    """The anchors that the run made or found."""
    notes: tuple[str, ...] = ()
    """What the user should know about the folder, the checkpoint or the data that was opened."""
    reach: GradientReach | None = None
    """What the retention gradient reaches, once `check_reach` has found it."""
    froze_downstream: bool = False
    """Whether `check_reach` froze what lies behind the deepest retained layer."""
    statistics: StatisticsChoice | None = None
    """The statistics that normalise the new data; None for a resumed run, which has its own."""

    @property
    def peak_lr(self) -> float:
        """The learning rate of the policy's preset, or the one that replaces it."""
        pipeline = pipeline_config(self.config, self.student, self.dataset, self.output)
        lr: float = pipeline.optimizer.lr
        return lr

    @property
    def steps_done(self) -> int:
        """Steps that an earlier part of the run has taken."""
        return self.resumed.step if self.resumed else 0

    def opposing_anchors(self, anchors: NumberedAnchors) -> int:
        """How many anchors show frames of the new data under the instruction that they have there.

        They hold the policy to what it did before where it is to learn something else. For a policy
        that reads no instructions, any frame of the new data does that.
        """
        common = common_frames(anchors.manifest.parts, identities(self.dataset))
        if not common:
            return 0
        every = anchors.instructions()
        shown = [(frame + c.shift, task) for frame, task in every for c in common if frame in c.old]
        if not reads_instructions(self.student):
            return len(anchors) if len(shown) == len(every) else len(shown)
        own = instructions_of_frames(self.dataset, [frame for frame, _ in shown])
        return sum(task == asked for (_, task), asked in zip(shown, own, strict=True))

    def out_of_reach(self) -> str | None:
        """The dataset's actions that the policy cannot take; None if it can take all."""
        if not self.student.apart:
            return describe_out_of_reach(self.student, self.dataset)
        # Each dataset has a reach of its own.
        parts = enumerate(parts_of(self.dataset))
        found = (describe_out_of_reach(for_dataset(self.student, n), part) for n, part in parts)
        return next((text for text in found if text), None)

    def sample_batch(self) -> Batch:
        """A batch of a few samples, spread over the data, to try the policy on."""
        rows = [number * len(self.dataset) // PROBE_ROWS for number in range(PROBE_ROWS)]
        preprocess = task_preprocessor(self.student, self.dataset)
        batch: Batch = preprocess(read_rows(self.dataset, rows))
        return batch

    def trainer(self, evaluator: Evaluator | None = None) -> Trainer:
        """The trainer of this run; call it once, after `prepare` has frozen what it must.

        `evaluator` measures the student between steps; a run with --eval-every needs one.
        """
        return Trainer(
            self.config,
            self.student,
            self.dataset,
            self.terms,
            output=self.output,
            resumed=self.resumed,
            processes=self.processes,
            evaluator=evaluator,
            froze_downstream=self.froze_downstream,
            free_share=self.free_share,
        )

    @property
    def free_share(self) -> float:
        """The share of the trained weights that is free to drift behind what is retained."""
        if self.reach is None or self.froze_downstream:
            return 0.0
        return self.reach.share(self.reach.free)


def open_run(
    config: TrainConfig,
    given: Mapping[str, Any],
    processes: Processes,
    *,
    record: Recorder | None = None,
) -> OpenedRun:
    """Open a new or a resumed run whole; `given` are the settings from the command line.

    `record` lets the policy act, for a run with --old-env.
    """
    run = start_run(config, given, processes, cache_given="cache" in given)
    if run.makes_anchors:
        run = with_own_anchors(run, plan_own_anchors(run), on_rows=lambda _: None, record=record)
    return open_run_terms(run, run.config.cache) if run.config.retains else run


def start_run(
    config: TrainConfig, given: Mapping[str, Any], processes: Processes, *, cache_given: bool
) -> OpenedRun:
    """Open the policy and the data of a new or a resumed run.

    `given` are the settings from the command line; `cache_given`, whether the user named a cache,
    there or in a file.
    """
    resumed, notes = _open_resumed(config, given, processes)
    config = resumed.config if resumed else config
    require_tracker(config.tracker)
    if resumed is None:
        _require_retention_steps(config)
    makes = resumed is None and makes_anchors(config, cache_given=cache_given)
    if makes:
        # Read again later; here, a name that is wrong is refused before the policy is loaded.
        old_instructions(config)
    if resumed is None:
        output, notes = _new_output(config, processes)
        config = record_paths(config, output)
    else:
        output = resumed.run
    with released_if_empty(output):
        run = open_policy_and_data(config, output, processes, resumed=resumed)
    return replace(run, makes_anchors=makes, notes=(*notes, *run.notes))


def open_policy_and_data(
    config: TrainConfig, output: Path, processes: Processes, *, resumed: Resumed | None = None
) -> OpenedRun:
    """Open the student and the data of the new task."""
    if resumed is None:
        require_unchanged_policy(config.policy)
        student = open_student(config)
    else:
        student = _open_checkpoint(config, resumed)
    if config.insulate:
        insulate(student)
    if config.gradient_checkpointing:
        student.adapter.enable_gradient_checkpointing(student.policy)
    dataset = open_task_data(config, student)
    fitted = None if resumed else fit_to(student, dataset, config.stats, is_task=True)
    notes = (describe_frame_rates(dataset), _describe_sharding(config, student, processes))
    return OpenedRun(
        config=config,
        output=output,
        processes=processes,
        student=fitted.policy if fitted else student,
        dataset=dataset,
        resumed=resumed,
        statistics=fitted.choice if fitted else None,
        notes=tuple(note for note in notes if note),
    )


def _describe_sharding(
    config: TrainConfig, student: Checkpoint, processes: Processes
) -> str | None:
    if config.parallel is not Parallel.FSDP or processes.alone:
        return None
    policy = student.policy
    return describe_units(student.adapter.shard_units(policy), policy.config.type)


def plan_own_anchors(run: OpenedRun) -> AnchorPlan:
    """Choose what the anchors of a run are made of."""
    return _plan_anchors(run, run.student)


def _plan_anchors(run: OpenedRun, teacher: Checkpoint) -> AnchorPlan:
    return plan_anchors(run.config, teacher.as_teacher(), run.dataset)


def with_own_anchors(
    run: OpenedRun,
    plan: AnchorPlan,
    *,
    on_rows: Callable[[int], None],
    record: Recorder | None = None,
) -> OpenedRun:
    """Make the anchors, or find them, in the folder of the run's own; returns the run with them.

    The run's settings name the cache from then on, so that --resume and `craft eval` find it.
    """
    teacher = run.student.as_teacher()
    own = make_anchors(plan, teacher, run.output.parent, on_rows=on_rows, record=record)
    return replace(run, own_anchors=own, config=replace(run.config, cache=absolute(own.cache)))


def open_run_terms(run: OpenedRun, cache: Location) -> OpenedRun:
    """Open the retention terms of a run; returns the run with them."""
    folder = run.resumed.run if run.resumed else None
    live = None
    if run.config.asks_teacher:
        plan = functools.partial(_plan_anchors, run)
        live = open_live_anchors(run.config, run.student.as_teacher(), plan, resumed=folder)
    terms = open_terms(
        run.config,
        run.student,
        cache,
        resumed=folder,
        live=live,
        # Missing in runs of earlier versions, which go on as they began.
        weighs_rows=run.resumed.state.get("weighs_rows", False) if run.resumed else True,
    )
    anchors, config = terms.anchors, run.config
    if anchors is not None:
        # A run records how many anchors a step has: the default may change.
        config = replace(config, anchor_batch_size=anchors.batch_size)
    stored = anchors.manifest.statistics if anchors else None
    student = with_anchors_of(run.student, stored)
    return replace(run, config=config, terms=terms, student=student)


@dataclass(frozen=True, kw_only=True, eq=False)
class Preparation:
    """The results of the checks before the first step."""

    check: SelfCheck | None
    """L_ret before the first step; None for a resumed run, or if no mode has an L_ret of 0."""
    reach: GradientReach
    run: OpenedRun
    """The run with these results; its trainer is the one to use."""


def prepare(run: OpenedRun, terms: RetentionTerms) -> Preparation:
    """Show that the constraint is real, or stop; freeze the parameters that must not drift."""
    check = check_start(run, terms)
    reach, run = check_reach(run, terms)
    return Preparation(check=check, reach=reach, run=run)


def check_start(run: OpenedRun, terms: RetentionTerms) -> SelfCheck | None:
    """Measure L_ret before the first step; stop if it is not 0 for the teacher itself."""
    check = self_check(terms) if run.resumed is None else None
    if check is not None and not run.config.other_student:
        require_self_check(check)
    return check


def check_reach(run: OpenedRun, terms: RetentionTerms) -> tuple[GradientReach, OpenedRun]:
    """Find what the retention gradient reaches; stop if next to nothing.

    Freezes what is downstream, if the settings say so or leave it open and it is a small part.
    """
    student = run.student
    chosen = run.config.freeze_downstream
    if chosen is None and run.resumed:
        # What the run did before counts, not what the weights of today suggest.
        chosen = run.resumed.state.get("froze_downstream")
    sample = run.sample_batch()
    reach = find_reach(student.policy, student.adapter, terms, sample, only_free=not chosen)
    frozen = reach.freezes(chosen)
    require_reach(reach, frozen=frozen)
    if frozen:
        freeze(student.policy, reach.downstream)
    return reach, replace(run, reach=reach, froze_downstream=frozen)


def _open_resumed(
    config: TrainConfig, given: Mapping[str, Any], processes: Processes
) -> tuple[Resumed | None, tuple[str, ...]]:
    """The run to resume, if there is one, checked for damage; and notes about that."""
    if config.resume is None:
        return None, ()
    resumed = read_run(
        config.resume,
        given,
        processes,
        step=config.from_,
        accept_changes=config.accept_changes,
    )
    return resumed, verify_checkpoint(resumed, processes)


def _new_output(config: TrainConfig, processes: Processes) -> tuple[Path, tuple[str, ...]]:
    """The folder of a new run, and notes about it."""
    note: str | None = None
    output = ""
    if processes.is_first:
        output = str(claim_output(config))
        note = recover_lost_run(Path(output))
        try:
            check_output(Path(output), overwrite=config.overwrite)
        except CraftError as error:
            why = f"{note[0].upper()}{note[1:]} {error.why}" if note else error.why
            raise CraftError(
                error.what, why=why, fix=error.fix, exit_code=error.exit_code
            ) from error
    # Its name has the time in it, which differs between processes.
    return Path(processes.agree(output)), (note,) if note else ()


def _require_retention_steps(config: TrainConfig) -> None:
    """Refuse a run whose only retention step is its first, in which there is nothing to retain."""
    if config.retains and 1 < config.retention_every >= config.steps:
        raise CraftError(
            "This run would retain nothing.",
            why=f"--retention-every {config.retention_every} gives {config.steps} steps a single "
            "retention step, the first, where the student still equals its teacher.",
            fix="lower --retention-every, take more --steps, or say --mode none.",
            exit_code=EXIT_USAGE,
        )


def _open_checkpoint(config: TrainConfig, resumed: Resumed) -> Checkpoint:
    checkpoint = load_checkpoint(
        str(resumed.checkpoint),
        device=choose_device(config.device),
        trust_remote_code=config.trust_remote_code,
    )
    return with_saved_teacher(checkpoint, trust_remote_code=config.trust_remote_code)
