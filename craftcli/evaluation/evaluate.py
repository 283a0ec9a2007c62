"""Evaluates a policy: drift from its teacher, losses on datasets, success in simulation."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import LossKind
from craftcli.errors import CraftError
from craftcli.evaluation.action_error import compare_actions
from craftcli.evaluation.dataset_loss import dataset_loss
from craftcli.evaluation.drift import measure_drift
from craftcli.evaluation.instruction_check import (
    FRAMES,
    known_instructions,
    measure_effect,
    reason_to_skip,
)
from craftcli.evaluation.results import (
    ActionError,
    DatasetLoss,
    Drift,
    Evaluation,
    InstructionCheck,
    Success,
)
from craftcli.evaluation.rollouts import EPISODES, FIRST_SEED, rollout
from craftcli.evaluation.simulators.base import Environment
from craftcli.evaluation.simulators.by_name import open_environments
from craftcli.evaluation.subject import Plan, Subject
from craftcli.evaluation.teacher_success import teacher_success
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.instructions import reads_instructions
from craftcli.policies.lerobot.task_processors import as_the_anchors, take_sizes_of
from craftcli.sources import load_policy, old_instructions, open_teacher

type Progress = Callable[[int, str, str], AbstractContextManager[Callable[[int], None]]]
"""Opens a progress bar with a total, a unit and a name; the value of the context advances it."""


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How much is measured, and how fast."""

    episodes: int = EPISODES
    seed: int = FIRST_SEED
    max_steps: int | None = None
    samples: int = 512
    """Frames of each dataset."""
    batch_size: int = EPISODES
    workers: int = 0


def evaluate_policy(
    subject: Subject,
    plan: Plan,
    amounts: Amounts,
    progress: Progress,
    *,
    anchor_root: str | None,
    with_teacher: bool = False,
) -> Evaluation:
    """Measure everything that is planned.

    `anchor_root` is the folder of the cache's dataset, if it has moved since the cache was built.
    `with_teacher` measures the teacher of a run too: on the same frames, in the same episodes.
    """
    # First, so that a simulator that is not installed fails before an hour of other work.
    config = subject.checkpoint.policy.config
    environments = [
        environment
        for name in plan.environments
        for environment in open_environments(name, config, max_steps=amounts.max_steps)
    ]
    environments += [
        dataclasses.replace(environment, group="old")
        for name in plan.old_environments
        for environment in open_environments(name, config, max_steps=amounts.max_steps)
    ]
    left_out = list(plan.left_out)
    drift = None
    if plan.cache is not None:
        drift = _drift(subject, plan.cache, amounts, progress, anchor_root, left_out)
    teacher = _OpenedTeacher(subject, left_out)
    of_teacher = teacher if with_teacher else None
    losses = _losses(subject, plan, amounts, progress, of_teacher)
    return Evaluation(
        policy=subject.identity,
        drift=drift,
        losses=tuple(own for own, _ in losses),
        teacher_losses=tuple(theirs for _, theirs in losses if theirs is not None),
        success=tuple(_rollouts(subject, environments, amounts, progress)),
        instructions=_listens(subject, plan, amounts, progress, teacher),
        teacher_success=tuple(
            _teacher_rollouts(subject, environments, amounts, progress, teacher, left_out)
            if with_teacher
            else ()
        ),
        left_out=tuple(left_out),
        when=datetime.now(UTC).isoformat(timespec="milliseconds"),
        verdict=subject.verdict,
    )


def _drift(
    subject: Subject,
    cache: CacheReader,
    amounts: Amounts,
    progress: Progress,
    anchor_root: str | None,
    left_out: list[str],
) -> Drift:
    config = subject.config
    root = anchor_root or (config.anchor_root if config else None)
    with progress(cache.manifest.rows, "anchors", "Drift") as advance:
        drift = measure_drift(
            subject.checkpoint,
            cache,
            loss=config.loss if config else LossKind.NMSE,
            trained_on=_open_trained_on(subject, cache, left_out),
            anchor_root=root,
            batch_size=amounts.batch_size,
            on_rows=advance,
        )
    if config and not config.uses_anchors:
        drift = dataclasses.replace(drift, shared_rows=0)
    if drift.action is not None:
        return drift
    try:
        teacher = _open_teacher(subject, cache)
    except CraftError as error:
        if subject.given_teacher is not None:
            raise  # the user has named it
        left_out.append(f"action error: {error.what} {error.why}")
        return drift
    try:
        action = _compare_with_teacher(subject, teacher, cache, amounts, root)
    except CraftError as error:
        left_out.append(f"action error: {error.what} {error.why}")
        return drift
    return dataclasses.replace(drift, action=action)


def _open_trained_on(
    subject: Subject, cache: CacheReader, left_out: list[str]
) -> CacheReader | None:
    """The cache that the run was trained to hold, if it still exists."""
    if subject.trained_on is None:
        return None
    if subject.trained_on == cache.path:
        return cache
    try:
        return CacheReader.open(subject.trained_on)
    except CraftError as error:
        left_out.append(f"whether these anchors are held out from the run's own: {error.what}")
        return None


def _open_teacher(subject: Subject, cache: CacheReader) -> Checkpoint:
    return open_teacher(
        cache.manifest,
        device=str(next(subject.checkpoint.policy.parameters()).device),
        named=subject.teacher,
        renames=subject.checkpoint.renames,
        trust_remote_code=subject.trust_remote_code,
    )


def _compare_with_teacher(
    subject: Subject, teacher: Checkpoint, cache: CacheReader, amounts: Amounts, root: str | None
) -> ActionError:
    return compare_actions(
        as_the_anchors(subject.checkpoint, cache.manifest.statistics),
        teacher,
        cache,
        seed=amounts.seed,
        batch_size=amounts.batch_size,
        anchor_root=root,
    )


def _losses(
    subject: Subject,
    plan: Plan,
    amounts: Amounts,
    progress: Progress,
    opened: "_OpenedTeacher | None",
) -> list[tuple[DatasetLoss, DatasetLoss | None]]:
    """The losses of the policy, and of its teacher on the same frames, through the same processors.

    A teacher that is not known, or not asked for (`opened` is None), has none.
    """
    losses = []
    for source in plan.datasets:
        policy = subject.policy_for(source.group, source.number)
        dataset = source.open_for(policy)
        teacher = None if opened is None else opened.checkpoint
        policies = [policy] if teacher is None else [policy, teacher.with_processors_of(policy)]
        frames = len(policies) * min(amounts.samples, len(dataset))
        with progress(frames, "frames", "Loss") as advance:
            found = [
                dataset_loss(
                    which,
                    dataset,
                    seed=amounts.seed,
                    group=source.group,
                    samples=amounts.samples,
                    batch_size=amounts.batch_size,
                    on_frames=advance,
                )
                for which in policies
            ]
        losses.append((found[0], found[1] if teacher is not None else None))
    return losses


def _listens(
    subject: Subject,
    plan: Plan,
    amounts: Amounts,
    progress: Progress,
    known: "_OpenedTeacher",
) -> InstructionCheck | None:
    """Whether the policy reads its instructions, on the datasets of the plan."""
    policies = [subject.policy_for(source.group, source.number) for source in plan.datasets]
    opened = [s.open_for(policy) for s, policy in zip(plan.datasets, policies, strict=True)]
    if not opened:
        return None
    instructions = _instructions(subject, plan, opened)
    if reason := reason_to_skip(subject.checkpoint, instructions):
        return InstructionCheck(skipped=reason)
    teacher = known.checkpoint
    frames = min(amounts.samples, FRAMES) * len(opened) * (1 if teacher is None else 2)
    with progress(frames, "frames", "Instructions") as advance:
        effects = [
            measure_effect(
                policy,
                # Both act through the same processors.
                teacher and teacher.with_processors_of(policy),
                dataset,
                instructions,
                seed=amounts.seed,
                group=source.group,
                samples=amounts.samples,
                batch_size=amounts.batch_size,
                on_frames=advance,
            )
            for source, policy, dataset in zip(plan.datasets, policies, opened, strict=True)
        ]
    return InstructionCheck(effects=tuple(effects))


def _instructions(subject: Subject, plan: Plan, opened: Sequence[Any]) -> list[str]:
    """The instructions of the datasets; if that is one, those of the run's anchors as well."""
    found = known_instructions(opened)
    if len(found) > 1 or not reads_instructions(subject.checkpoint):
        return found
    cache = plan.cache or subject.own_cache()
    if cache is not None:
        found += [task for task in cache.tasks if task]
    elif subject.config is not None:
        # Its anchors are made at every step. If these cannot be read, the check is skipped.
        with contextlib.suppress(CraftError):
            found += old_instructions(subject.config)
    return list(dict.fromkeys(found))


class _OpenedTeacher:
    """The policy that the run started from, or that the user names; loaded when it is needed."""

    def __init__(self, subject: Subject, left_out: list[str]) -> None:
        self._subject = subject
        self._left_out = left_out

    @functools.cached_property
    def checkpoint(self) -> Checkpoint | None:
        """None without a run and a name, or if it cannot be loaded or is of another kind."""
        subject, config = self._subject, self._subject.config
        named = subject.given_teacher
        if named is None and config is None:
            return None
        try:
            teacher = load_policy(
                named or (config.policy if config else ""),
                device=str(next(subject.checkpoint.policy.parameters()).device),
                revision=config.revision if config and named is None else None,
                renames=subject.checkpoint.renames,
                trust_remote_code=subject.trust_remote_code,
            )
        except CraftError as error:
            self._left_out.append(f"what the teacher does: {error.what} {error.why}")
            return None
        kind, own = teacher.policy_type, subject.checkpoint.policy_type
        if kind != own:
            self._left_out.append(f"what the teacher does: it is a {kind}, the policy a {own}")
            return None
        take_sizes_of(teacher, subject.checkpoint)
        return teacher


def _teacher_rollouts(
    subject: Subject,
    environments: list[Environment],
    amounts: Amounts,
    progress: Progress,
    opened: _OpenedTeacher,
    left_out: list[str],
) -> list[Success]:
    """The success of the teacher in the same episodes; what fails is left out."""
    if not environments or opened.checkpoint is None:
        return []
    teacher, found = opened.checkpoint, []
    with progress(len(environments) * amounts.episodes, "episodes", "Teacher") as advance:
        for environment in environments:
            actor = teacher.with_processors_of(subject.policy_for(environment.group))
            measure = functools.partial(_rollout, actor, environment, amounts, advance)
            seeds = range(amounts.seed, amounts.seed + amounts.episodes)
            try:
                found.append(teacher_success(actor, environment, seeds, subject.home, measure))
            except CraftError as error:
                left_out.append(f"the teacher in {environment.name}: {error.what} {error.why}")
    return found


def _rollout(
    policy: Checkpoint,
    environment: Environment,
    amounts: Amounts,
    on_episodes: Callable[[int], None],
) -> Success:
    return rollout(
        policy,
        environment,
        episodes=amounts.episodes,
        seed=amounts.seed,
        batch_size=amounts.batch_size,
        workers=amounts.workers,
        on_episodes=on_episodes,
    )


def _rollouts(
    subject: Subject, environments: list[Environment], amounts: Amounts, progress: Progress
) -> list[Success]:
    if not environments:
        return []
    with progress(len(environments) * amounts.episodes, "episodes", "Success") as advance:
        return [
            _rollout(subject.policy_for(environment.group), environment, amounts, advance)
            for environment in environments
        ]
