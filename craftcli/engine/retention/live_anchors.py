"""Anchors that are new in every batch, with the answers of a live teacher.

A batch is drawn from the rows that `craft cache build` would store with a seed of the batch's own:
other frames, other variations of them, other states, other instructions, other draws of noise.
Nothing is stored, and the same seed and number always give the same batch.
"""

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from craftcli.cache.build.build import describe_build, open_source
from craftcli.cache.build.recipe import resolve_recipe
from craftcli.cache.build.row_sources import RowSource, row_seed
from craftcli.cache.build.teacher import HIDDEN, TeacherRows
from craftcli.cache.format import OUTPUT_MASK, PREDICTION, Manifest
from craftcli.cache.identity import TEACHER_FIELDS
from craftcli.cache.stats import Moments, scalar_variance
from craftcli.choices import Kind
from craftcli.config.parsing import JOINED
from craftcli.engine.anchor_plan import AnchorPlan
from craftcli.engine.retention.anchors import AnchorBatch, Walk
from craftcli.engine.retention.live_teacher import LiveTeacher
from craftcli.engine.retention.task_variances import within_tasks
from craftcli.engine.transfers import to_device
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.lerobot.batches import remember_if_small
from craftcli.policies.lerobot.task_processors import fit_to
from craftcli.whole_files import write_text

LIVE_FILE = "live_teacher.json"
"""In a run's folder: what a resumed run must find again."""
VARIANCE_ROWS = 512
"""Rows that give the teacher's variance: enough for a scale."""
_MASK = "hidden_mask"


@dataclass(frozen=True, kw_only=True)
class LiveRecord:
    """What a resumed run must find again, and what it does not measure again."""

    sources: Mapping[str, str | None]
    """Digests of the teacher, of the data that anchors are made of, and of the instructions."""
    variances: Mapping[str, float]
    invalid: int
    """Of the rows that gave the variances, those on which the teacher is not finite."""
    task_variances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Within each task, by its instruction; earlier versions had one variance for all."""

    @classmethod
    def read(cls, run: Path) -> "LiveRecord":
        """The record of a run.

        Raises:
            CraftError: It has none.
        """
        try:
            return cls(**json.loads((run / LIVE_FILE).read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CraftError(
                f"Cannot resume {run}: its live teacher is unknown.",
                why=f"{LIVE_FILE} cannot be read ({error}).",
                fix="resume from another copy of the run, or start a new one.",
            ) from error


class LiveAnchors:
    """Numbered batches of fresh anchors; the teacher answers when a batch is asked for.

    Rows on which the teacher is not finite are left out of their batch.
    """

    waited_s: float = 0.0
    """The teacher's answers are part of the step; its inputs are made in them."""
    held_out: Walk | None = None
    """Every anchor is new: L_ret itself shows what is held where nothing was trained."""

    def __init__(
        self,
        plan: AnchorPlan,
        teacher: LiveTeacher,
        *,
        kinds: Collection[Kind],
        batch_size: int,
        seed: int,
        known: LiveRecord | None = None,
    ) -> None:
        """`known` is the record of a resumed run."""
        self.plan = plan
        self.teacher = teacher
        self.batch_size = batch_size
        self._seed = seed
        self._config = replace(plan.config, kind=JOINED.join(kinds))
        self._dataset = None if plan.dataset is None else remember_if_small(plan.dataset)
        # Statistics are chosen as for a cache.
        fitted = fit_to(teacher.checkpoint, plan.normalised, self._config.stats)
        # A copy, because a pipeline keeps state while it runs, and the student's may be the same.
        self._checkpoint = replace(
            fitted.policy, preprocess=copy.deepcopy(fitted.policy.preprocess)
        )
        source = self._source(self._config.seed)
        self._require_batch(len(source))
        recipe = resolve_recipe(self._config, self._checkpoint)
        with teacher.answering():
            self._rows = TeacherRows(self._checkpoint, source, recipe)
        self.manifest: Manifest = describe_build(
            self._config,
            self._checkpoint,
            source,
            plan.prompts,
            self._rows,
            statistics=fitted.stored,
        )
        if known is not None:
            self._require_same(known)
        record = known or self._measure(source)
        self.variances, self.invalid = dict(record.variances), record.invalid
        self._task_variances = record.task_variances

    def __len__(self) -> int:
        """Rows that a batch is drawn from."""
        return self.manifest.rows

    def __repr__(self) -> str:
        return f"LiveAnchors({self.plan.about}, batch_size={self.batch_size})"

    @property
    def cost(self) -> str:
        """What the live teacher costs, beside a cache."""
        if self.teacher.copied:
            size = f"a copy of the policy in memory ({self.teacher.copied_bytes / 2**20:.1f} MiB)"
        else:
            size = "no copy of the policy: its LoRA weights are switched off meanwhile"
        return (
            f"one more forward pass of {self.batch_size} anchors a retention step and {size}; a "
            f"cache would take one pass over {len(self)} anchors before the first step"
        )

    def save(self, run: Path) -> None:
        """Write what a resumed run must find again into the folder of the run."""
        record = LiveRecord(
            sources=self._sources(),
            variances=self.variances,
            invalid=self.invalid,
            task_variances=self._task_variances,
        )
        write_text(run / LIVE_FILE, json.dumps(asdict(record), indent=2))

    def to_json(self) -> dict[str, Any]:
        """Where the anchors come from, as JSON values."""
        return {
            "source": self.plan.source,
            "about": self.plan.about,
            "expectation": self.plan.expectation,
            "teacher": "live",
            "copied_bytes": self.teacher.copied_bytes,
            "invalid": self.invalid,
        }

    def batch(self, number: int, device: torch.device, *, following: int = 1) -> AnchorBatch:
        """The batch with this number: its rows are drawn anew, and the teacher answers."""
        batch, tasks, _ = self._answer(*self._draw(number), device)
        return replace(batch, variances=self._row_variances(tasks, device))

    def _row_variances(self, tasks: list[str], device: torch.device) -> dict[str, Tensor]:
        """What nmse is a share of, for rows of these tasks."""
        found = {}
        for name, whole in self.variances.items():
            own = self._task_variances.get(name, {})
            found[name] = to_device(torch.tensor([own.get(task, whole) for task in tasks]), device)
        return found

    def held_out_batch(self, number: int, device: torch.device) -> AnchorBatch:
        """There are no held-out anchors."""
        raise RuntimeError("a live teacher has no held-out anchors")

    def instructions(self) -> list[tuple[int, str]]:
        """The frames and the instructions of the first batch."""
        source, rows = self._draw(0)
        index = source.read(rows).index
        frames, tasks = index["index/dataset_index"], index["index/task"]
        return [(int(f), source.tasks[int(t)]) for f, t in zip(frames, tasks, strict=True)]

    def _source(self, seed: int) -> RowSource:
        """The rows that a build with this seed would store."""
        config = replace(self._config, seed=seed)
        prompts = replace(self.plan.prompts, seed=seed)
        return open_source(config, self._checkpoint, self._dataset, prompts)

    def _draw(self, number: int) -> tuple[RowSource, list[int]]:
        seed = row_seed(self._seed, number)
        source = self._source(seed)
        rows = np.random.default_rng(seed).choice(len(source), self.batch_size, replace=False)
        return source, rows.tolist()

    def _answer(
        self, source: RowSource, rows: Sequence[int], device: torch.device
    ) -> tuple[AnchorBatch, list[str], int]:
        """These rows with the teacher's answers, and their tasks; how many rows were left out."""
        raw = source.read(rows)
        prepared = self._rows.prepare_raw(raw)
        with self.teacher.answering():
            answers = self._rows.answer(prepared)
        finite = answers.valid
        if not finite.any():
            raise CraftError(
                "The teacher's outputs are not finite.",
                why=f"all {len(rows)} anchors of a batch have NaN or infinity.",
                fix="check the weights of the teacher and the data that anchors are made of.",
            )

        def kept(values: Tensor) -> Tensor:
            return (values if finite.all() else values[finite]).to(device)

        targets = {name: kept(values) for name, values in answers.targets.items()}
        hidden = {n.removeprefix(HIDDEN): v.float() for n, v in targets.items() if _is_hidden(n)}
        batch = AnchorBatch(
            inputs={name: kept(values) for name, values in answers.inputs.items()},
            targets=hidden,
            mask=targets.get(_MASK),
            outputs={n: v for n, v in targets.items() if not _is_hidden(n) and n != _MASK},
            variances={},
        )
        numbers = np.asarray(raw.index["index/task"])[finite.cpu().numpy()]
        return batch, [source.tasks[number] for number in numbers], int((~finite).sum())

    def _measure(self, source: RowSource) -> LiveRecord:
        """The teacher's variances over rows of a source, and within its tasks."""
        device = next(self._checkpoint.policy.parameters()).device
        most = min(VARIANCE_ROWS, len(source))
        rows = np.random.default_rng(self._config.seed).permutation(len(source))[:most].tolist()
        moments: dict[str, dict[str, Moments]] = {}
        invalid = 0
        for start in range(0, len(rows), self._config.batch_size):
            piece = rows[start : start + self._config.batch_size]
            batch, tasks, left_out = self._answer(source, piece, device)
            invalid += left_out
            found = {name: (values, batch.mask) for name, values in batch.targets.items()}
            if PREDICTION in batch.outputs:
                found[PREDICTION] = batch.outputs[PREDICTION], batch.outputs[OUTPUT_MASK]
            for name, (values, mask) in found.items():
                if mask is not None:
                    _add(moments.setdefault(name, {}), values, mask, tasks)
        whole = {name: _together(list(own.values())) for name, own in moments.items()}
        variances = {name: scalar_variance(m.variance, m.count) for name, m in whole.items()}
        flat = [name for name, variance in variances.items() if variance <= 0]
        if flat:
            raise CraftError(
                "The anchors cannot be normalised.",
                why=f"{flat[0]} has zero variance over {most} of them.",
                fix="make more anchors with --anchor-samples, or take them from other data.",
            )
        several = {name: own for name, own in moments.items() if len(own) > 1}
        return LiveRecord(
            sources=self._sources(),
            variances=variances,
            invalid=invalid,
            task_variances={n: within_tasks(own, variances[n]) for n, own in several.items()},
        )

    def _require_batch(self, rows: int) -> None:
        if rows < self.batch_size:
            raise CraftError(
                f"There are {rows} anchors to draw from, fewer than a batch.",
                why=f"a retention step uses {self.batch_size} of them.",
                fix=f"use --anchor-batch-size {rows}, or more with --anchor-samples.",
                exit_code=EXIT_USAGE,
            )

    def _require_same(self, known: LiveRecord) -> None:
        """Refuse to resume with another teacher, other data or other instructions."""
        now = self._sources()
        changed = [name for name in now if known.sources.get(name) != now[name]]
        if changed:
            raise CraftError(
                "Cannot resume: the live teacher is not the one that the run began with.",
                why=f"{', '.join(changed)} changed since then (teacher: "
                f"{self._checkpoint.source}).",
                fix="put back the policy, the data and the instructions that the run began with.",
            )

    def _sources(self) -> dict[str, str | None]:
        manifest = self.manifest
        digests = {name: getattr(manifest.teacher, name) for name in TEACHER_FIELDS}
        return {
            **digests,
            "data": manifest.dataset.fingerprint,
            "instructions": manifest.prompts_digest,
        }


def _is_hidden(name: str) -> bool:
    return name.startswith(HIDDEN)


def _add(moments: dict[str, Moments], values: Tensor, mask: Tensor, tasks: list[str]) -> None:
    """Count vectors [B, V, D] for the tasks of their rows."""
    numbers, kept = values.cpu().numpy(), mask.cpu().numpy()
    for task in dict.fromkeys(tasks):
        own = np.array([other == task for other in tasks])
        moments.setdefault(task, Moments(*numbers.shape[1:])).update(numbers[own], kept[own])


def _together(parts: Sequence[Moments]) -> Moments:
    whole = Moments(*parts[0].mean.shape)
    for part in parts:
        whole.add(part)
    return whole
