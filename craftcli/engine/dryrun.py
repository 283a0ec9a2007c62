"""A rehearsal of a run: numbered checks, then a few real steps; nothing is kept."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craftcli.cache.build import build_cache
from craftcli.choices import Kind, OutputKind
from craftcli.config import JOINED, CacheConfig, PolicyAndData, TrainConfig
from craftcli.engine.compatibility import require_self_check, self_check
from craftcli.engine.opening import open_retention
from craftcli.engine.peak_memory import peak_memory_bytes
from craftcli.engine.reach import (
    describe_downstream,
    describe_idle,
    describe_trainable,
    find_reach,
    freeze,
    require_reach,
)
from craftcli.engine.retention import Retention
from craftcli.engine.session import (
    open_anchor_data,
    open_student,
    open_task_data,
)
from craftcli.engine.trainer import Trainer
from craftcli.errors import CraftError
from craftcli.locations import Location
from craftcli.policies.loading import Checkpoint
from craftcli.policies.memory import save_memory
from craftcli.report.metrics import StepReport


@dataclass(frozen=True, kw_only=True)
class Check:
    """The answer to one question."""

    title: str
    passed: bool
    detail: str


class DryRun:
    """Goes through what `craft train` would do with the same settings."""

    def __init__(self, config: TrainConfig, *, cache_given: bool, scratch: Path) -> None:
        self.config = config
        self._cache_given = cache_given
        self._scratch = scratch
        self._student: Checkpoint
        self._dataset: Any
        self._retention: Retention | None = None
        self._trainer: Trainer

    def checks(self) -> Iterator[Check]:
        """The checks in order; none comes after one that failed."""
        questions: list[tuple[str, Callable[[], str]]] = [
            ("Policy and dataset fit", self._open_policy_and_data)
        ]
        if self.config.retains:
            questions += [
                ("Cache matches the teacher", self._open_cache),
                ("L_ret = 0 at the teacher's weights", self._check_zero),
                ("Retention reaches what is trained", self._check_reach),
            ]
        for title, ask in questions:
            try:
                answer = ask()
            except CraftError as problem:
                yield Check(title=title, passed=False, detail=str(problem))
                return
            yield Check(title=title, passed=True, detail=answer)

    def steps(self) -> Iterator[StepReport]:
        """Real steps, after the checks have passed."""
        return self._trainer.steps()

    @property
    def output_kind(self) -> OutputKind | None:
        """What the policy predicts, after the checks have passed; None without an adapter."""
        return self._student.adapter.output_kind

    def out_of_reach(self) -> str | None:
        """Which of the new actions the policy cannot take, after the checks have passed."""
        return self._trainer.out_of_reach()

    def peak_memory_bytes(self) -> int:
        """The most memory used so far, on the GPU if there is one."""
        return peak_memory_bytes(next(self._student.policy.parameters()).device)

    def _open_policy_and_data(self) -> str:
        self._student = open_student(self.config)
        if self.config.gradient_checkpointing:
            save_memory(self._student.policy)
        self._dataset = open_task_data(self.config, self._student)
        self._trainer = self._make_trainer()
        policy, meta = self._student.policy, self._dataset.meta
        features = [*policy.config.input_features, *policy.config.output_features]
        parameters = sum(p.numel() for p in policy.parameters())
        return (
            f"{self._student.policy_type}, {parameters / 1e6:.2f}M parameters, all weights loaded; "
            f"{self._dataset.repo_id}, {meta.total_episodes} episodes, {meta.total_frames} frames; "
            f"features {', '.join(features)}"
        )

    def _open_cache(self) -> str:
        cache, origin = self.config.cache, str(self.config.cache)
        if not self._cache_given and isinstance(cache, Path) and not cache.exists():
            cache, origin = self._build_small_cache()
        self._retention = open_retention(self.config, self._student, cache)
        self._trainer = self._make_trainer()
        if self._retention.anchors is None:
            return "no cache is needed: weights are held"
        manifest = self._retention.anchors.manifest
        held = ", ".join(manifest.kinds)
        if manifest.layers:
            layers = ", ".join(str(layer) for layer in manifest.layers)
            held += f" (layers {layers} of {manifest.layer_count} in {manifest.stack}, "
            held += f"{manifest.pooling})"
        return (
            f"{origin}: {len(self._retention.anchors)} rows of {held}; "
            f"weights {manifest.teacher.weights_digest[:12]}"
        )

    def _check_zero(self) -> str:
        check = self_check(self._held)
        if check is None:
            return f"nothing to compare with in --mode {self.config.mode}"
        if self.config.other_student:
            return f"not asked for, the student is another: {check.drift:.3g} of the variance"
        require_self_check(check)
        return f"{check.drift:.2g} of the teacher's variance (rounding allows {check.tolerance:g})"

    def _check_reach(self) -> str:
        student = self._student
        reach = find_reach(
            student.policy, student.adapter, self._held, self._trainer.sample_batch()
        )
        require_reach(reach)
        if self.config.freeze_downstream:
            freeze(student.policy, reach.downstream)
        idle = describe_idle(reach)
        return (
            f"{len(reach.retained)} of {len(reach.trainable)} trainable tensors: "
            f"{describe_trainable(student.policy, reach)}; "
            + describe_downstream(reach, frozen=self.config.freeze_downstream)
            + (f"; {idle}" if idle else "")
        )

    @property
    def _held(self) -> Retention:
        if self._retention is None:
            raise RuntimeError("the cache check comes first")
        return self._retention

    def _make_trainer(self) -> Trainer:
        return Trainer(
            self.config,
            self._student,
            self._dataset,
            self._retention,
            output=self._scratch / "run",
        )

    def _build_small_cache(self) -> tuple[Location, str]:
        shared = {f.name: getattr(self.config, f.name) for f in dataclasses.fields(PolicyAndData)}
        data = open_anchor_data(self.config, self._student)
        stored = [kind for kind in Kind if kind.value in self.config.modes]
        config = CacheConfig(
            **shared,
            kind=JOINED.join(stored) or None,
            output=self._scratch / "anchors.zarr",
            samples=min(len(data), 2 * self.config.anchor_batch_size),
        )
        build_cache(
            config, self._student, data, on_plan=lambda plan: None, on_rows=lambda rows: None
        )
        return (
            config.output,
            f"a temporary cache of {data.repo_id}, for want of {self.config.cache}",
        )
