"""Evaluating a policy on everything that was planned."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from craftcli.cache.reader import CacheReader
from craftcli.choices import LossKind
from craftcli.errors import CraftError
from craftcli.evaluation.dataset_losses import dataset_loss
from craftcli.evaluation.drift import measure_drift
from craftcli.evaluation.environments import open_environments
from craftcli.evaluation.findings import ActionError, DatasetLoss, Drift
from craftcli.evaluation.record import Evaluation
from craftcli.evaluation.rollouts import EPISODES, FIRST_SEED, rollout
from craftcli.evaluation.subject import Plan, Subject
from craftcli.evaluation.success import Success
from craftcli.evaluation.teacher_actions import compare_actions, open_teacher
from craftcli.locations import Location
from craftcli.policies.data import open_dataset

type Progress = Callable[[int, str], AbstractContextManager[Callable[[int], None]]]
"""Opens a progress bar of so many units; calling what it gives advances it."""


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How much is measured, and how fast."""

    episodes: int = EPISODES
    seed: int = FIRST_SEED
    max_steps: int | None = None
    samples: int = 512
    """Frames of a dataset."""
    batch_size: int = EPISODES
    workers: int = 0


def evaluate(
    subject: Subject, plan: Plan, amounts: Amounts, progress: Progress, *, anchor_root: str | None
) -> Evaluation:
    """Measure drift, losses and success, as far as each is planned."""
    # First, so that a simulator that is not installed is noticed before an hour of work.
    environments = [
        environment
        for name in plan.environments
        for environment in open_environments(
            name, subject.checkpoint.policy.config, max_steps=amounts.max_steps
        )
    ]
    left_out = list(plan.left_out)
    drift = None
    if plan.cache is not None:
        drift = _drift(subject, plan.cache, amounts, progress, anchor_root, left_out)
    losses = _losses(subject, plan, amounts, progress)
    success: list[Success] = []
    if environments:
        with progress(len(environments) * amounts.episodes, "episodes") as advance:
            success = [
                rollout(
                    subject.checkpoint,
                    environment,
                    episodes=amounts.episodes,
                    seed=amounts.seed,
                    batch_size=amounts.batch_size,
                    workers=amounts.workers,
                    on_episodes=advance,
                )
                for environment in environments
            ]
    return Evaluation(
        policy=subject.identity,
        drift=drift,
        losses=tuple(losses),
        success=tuple(success),
        left_out=tuple(left_out),
    )


def _drift(
    subject: Subject,
    cache: Location,
    amounts: Amounts,
    progress: Progress,
    anchor_root: str | None,
    left_out: list[str],
) -> Drift:
    reader = CacheReader.open(cache)
    config = subject.config
    root = anchor_root or (config.anchor_root if config else None)
    with progress(reader.manifest.rows, "anchors") as advance:
        drift = measure_drift(
            subject.checkpoint,
            cache,
            loss=config.loss if config else LossKind.NMSE,
            trained_on=_held(subject, left_out),
            anchor_root=root,
            batch_size=amounts.batch_size,
            on_rows=advance,
        )
    if config and not config.uses_anchors:
        drift = dataclasses.replace(drift, shared_rows=0)
    if drift.action is not None:
        return drift
    try:
        action = _against_teacher(subject, reader, amounts, root)
    except CraftError as error:
        left_out.append(f"action error: {error.what} {error.why}")
        return drift
    return dataclasses.replace(drift, action=action)


def _held(subject: Subject, left_out: list[str]) -> Location | None:
    """The cache that the run was held to, if it is still there to be compared with."""
    if subject.trained_on is None:
        return None
    try:
        CacheReader.open(subject.trained_on)
    except CraftError as error:
        left_out.append(f"whether these anchors are held out from the run's own: {error.what}")
        return None
    return subject.trained_on


def _against_teacher(
    subject: Subject, reader: CacheReader, amounts: Amounts, root: str | None
) -> ActionError:
    device = str(next(subject.checkpoint.policy.parameters()).device)
    return compare_actions(
        subject.checkpoint,
        open_teacher(
            reader.manifest,
            device=device,
            renames=subject.checkpoint.renames,
            trust_remote_code=subject.trust_remote_code,
        ),
        reader,
        seed=amounts.seed,
        batch_size=amounts.batch_size,
        anchor_root=root,
    )


def _losses(
    subject: Subject, plan: Plan, amounts: Amounts, progress: Progress
) -> list[DatasetLoss]:
    found = []
    for source in plan.datasets:
        dataset = open_dataset(
            source.repo_id,
            root=source.root,
            revision=source.revision,
            policy_config=subject.checkpoint.policy.config,
            renames=subject.checkpoint.renames,
        )
        with progress(min(amounts.samples, len(dataset)), "frames") as advance:
            loss = dataset_loss(
                subject.checkpoint,
                dataset,
                seed=amounts.seed,
                group=source.group,
                samples=amounts.samples,
                batch_size=amounts.batch_size,
                on_frames=advance,
            )
        found.append(loss)
    return found
