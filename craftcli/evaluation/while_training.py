"""Measures a policy between the steps of its training, for `--eval-every`.

- old: the retention loss on held-out anchors (`--held-out-share`), else on the run's own anchors;
  a live teacher answers on anchors that no step has seen.
- new: the policy's own loss on `--eval-dataset`, else on frames that it is trained on.
- success, old and new, in a few episodes of `--eval-env` and `--eval-old-env`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import torch

from craftcli.config.parsing import split_list
from craftcli.config.train import TrainConfig
from craftcli.demo.datasets import NEW
from craftcli.engine.retention.anchors import AnchorBatch, AnchorSet
from craftcli.engine.retention.imitation import Imitation
from craftcli.engine.retention.terms import RetentionTerms
from craftcli.engine.run import OpenedRun
from craftcli.engine.watch import Figures
from craftcli.evaluation.dataset_loss import dataset_loss
from craftcli.evaluation.rollouts import FIRST_SEED, rollout
from craftcli.evaluation.simulators.base import Environment
from craftcli.evaluation.simulators.by_name import open_environments
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.task_processors import for_old_tasks
from craftcli.sources import data_source

ANCHORS = 256
"""About how many anchors the retention loss is measured on."""
FRAMES = 128
"""How many frames the loss on new data is measured on."""
_UNSEEN = 10**9
"""Number of the first batch of a live teacher that is measured; no run has so many turns."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainingEvaluator:
    """Measures the student of a run, the same way every time."""

    student: Checkpoint
    imitation: Imitation | None
    """Compares the student with its teacher; None if no mode does."""
    dataset: Any
    environments: tuple[Environment, ...]
    episodes: int
    about: tuple[str, ...]
    """What is measured, as sentences for the user."""

    @torch.no_grad()
    def __call__(self) -> Figures:
        """The figures of the student now."""
        return Figures(
            old_loss=self._old_loss(),
            new_loss=self._new_loss(),
            old_success=self._success("old"),
            new_success=self._success("new"),
        )

    def _old_loss(self) -> float | None:
        if self.imitation is None:
            return None
        device = next(self.student.policy.parameters()).device
        found = []
        for batch in _anchor_batches(self.imitation, device):
            losses = self.imitation.compare(
                self.imitation.features(batch), batch, self.imitation.loss
            )
            found.append(fmean(loss.total.item() for loss in losses.values()))
        return fmean(found)

    def _new_loss(self) -> float:
        loss = dataset_loss(self.student, self.dataset, seed=FIRST_SEED, samples=FRAMES)
        return loss.mean

    def _success(self, group: str) -> float | None:
        self.student.adapter.forget_old_weights(self.student.policy)
        policy = for_old_tasks(self.student) if group == "old" else self.student
        found = [
            rollout(policy, world, episodes=self.episodes, batch_size=self.episodes)
            for world in self.environments
            if world.group == group
        ]
        return fmean(success.rate for success in found) if found else None


def open_evaluator(run: OpenedRun) -> TrainingEvaluator | None:
    """What measures a run while it trains; None if it is not to be measured."""
    config = run.config
    if not config.eval_every:
        return None
    imitation = _imitation(run.terms)
    environments = tuple(_environments(config, run.student))
    dataset = run.dataset
    if config.eval_dataset is not None:
        source = data_source(config.eval_dataset, root=None, revision=None, demo=NEW)
        dataset = source.open_for(run.student, config.stats)
    return TrainingEvaluator(
        student=run.student,
        imitation=imitation,
        dataset=dataset,
        environments=environments,
        episodes=config.eval_episodes,
        about=tuple(_describe(config, imitation, environments)),
    )


def _describe(
    config: TrainConfig, imitation: Imitation | None, environments: tuple[Environment, ...]
) -> Iterator[str]:
    if imitation is None:
        yield "The old skill is not measured by anchors: no mode compares any."
    elif not isinstance(imitation.anchors, AnchorSet) or imitation.anchors.held_out:
        yield "old: the retention loss on anchors that are not trained on."
    else:
        yield "old: the retention loss on anchors of the run; --held-out-share keeps some apart."
    if config.eval_dataset is None:
        yield "new: the loss on frames that are trained on; --eval-dataset names held-out data."
    else:
        yield f"new: the loss on {config.eval_dataset}."
    if environments:
        names = ", ".join(f"{world.name} ({world.group})" for world in environments)
        yield f"success: {config.eval_episodes} episodes in each of {names}."


def _imitation(terms: RetentionTerms | None) -> Imitation | None:
    return next((term for term in terms or () if isinstance(term, Imitation)), None)


def _environments(config: TrainConfig, student: Checkpoint) -> Iterator[Environment]:
    for names, group in ((config.eval_env, "new"), (config.eval_old_env, "old")):
        for name in split_list(names):
            for world in open_environments(name, student.policy.config):
                own = world.group if group == "new" else None
                yield dataclasses.replace(world, group=own or group)


def _anchor_batches(imitation: Imitation, device: torch.device) -> Iterator[AnchorBatch]:
    """The anchors to measure on: the same batches every time, one round at most."""
    anchors = imitation.anchors
    read: Callable[[int], AnchorBatch]
    size, rows = anchors.batch_size, ANCHORS
    if not isinstance(anchors, AnchorSet):

        def read(number: int) -> AnchorBatch:
            return anchors.batch(_UNSEEN + number, device)

    elif anchors.held_out is not None:
        size, rows = min(size, len(anchors.held_out)), len(anchors.held_out)

        def read(number: int) -> AnchorBatch:
            return anchors.held_out_batch(number, device)

    else:
        walk, rows = anchors.walk, len(anchors)

        def read(number: int) -> AnchorBatch:
            # Not `batch`, which prepares the next one of training.
            return anchors.read(walk.rows(number), device)

    for number in range(math.ceil(min(ANCHORS, rows) / size)):
        yield read(number)
