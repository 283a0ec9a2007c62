"""A rehearsal of a run: numbered checks, then a few real steps; nothing is kept."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craftcli.choices import OutputKind
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.metrics import StepReport
from craftcli.engine.own_anchors import Recorder, make_anchors, makes_anchors
from craftcli.engine.retention.gradient_reach import (
    describe_downstream,
    describe_idle,
    describe_little,
    describe_share,
    describe_trainable,
)
from craftcli.engine.retention.live_anchors import LiveAnchors
from craftcli.engine.retention.terms import RetentionTerms
from craftcli.engine.run import (
    OpenedRun,
    check_reach,
    check_start,
    open_policy_and_data,
    open_run_terms,
    plan_own_anchors,
)
from craftcli.engine.summary import peak_memory_bytes
from craftcli.engine.watch import Evaluator
from craftcli.errors import CraftError
from craftcli.locations import Location
from craftcli.policies.lerobot.several_datasets import parts_of

_TRIAL_ROWS = 32
"""Anchors that are made to try: enough for the variance that losses are divided by."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check."""

    title: str
    passed: bool
    detail: str


class DryRun:
    """Takes the steps of `craft train` with the same settings, and reports each as a check."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        cache_given: bool,
        scratch: Path,
        record: Recorder | None = None,
    ) -> None:
        """`scratch` is a folder for temporary files; `cache_given`, whether the user named a cache.

        `record` lets the policy act, for a run with --old-env.
        """
        self.config = config
        self._cache_given = cache_given
        self._scratch = scratch
        self._record = record
        self._opened: OpenedRun | None = None
        self.anchors: dict[str, Any] | None = None
        """The anchors that the run would make, as JSON; None if it has a cache or needs none."""

    @property
    def run(self) -> OpenedRun:
        """The run, once the first check has passed."""
        if self._opened is None:
            raise RuntimeError("the policy and the data were not opened")
        return self._opened

    def checks(self) -> Iterator[Check]:
        """The checks in order; the first one that fails is the last."""
        steps: list[tuple[str, Callable[[], str]]] = [
            ("Policy and dataset fit", self._open_policy_and_data),
            ("Statistics normalise the data", self._describe_statistics),
        ]
        if self.config.retains:
            steps += [
                ("Cache matches the teacher", self._open_terms),
                ("L_ret = 0 at the teacher's weights", self._check_start),
                ("Retention reaches what is trained", self._check_reach),
            ]
        for title, take in steps:
            try:
                detail = take()
            except CraftError as problem:
                yield Check(title=title, passed=False, detail=str(problem))
                return
            yield Check(title=title, passed=True, detail=detail)

    def steps(self, evaluator: Evaluator | None = None) -> Iterator[StepReport]:
        """Real training steps, after the checks have passed."""
        return self.run.trainer(evaluator).steps()

    @property
    def output_kind(self) -> OutputKind | None:
        """What the policy predicts, after the checks have passed; None without an adapter."""
        return self.run.student.adapter.output_kind

    def remarks(self) -> list[str]:
        """What is wrong with the new data or their statistics, and how little retention holds."""
        found = [*self.run.notes, *(self.run.statistics.remarks() if self.run.statistics else ())]
        reach, frozen = self.run.reach, self.run.froze_downstream
        little = describe_little(reach, frozen=frozen) if reach else None
        return [*found, f"{little}."] if little else found

    def out_of_reach(self) -> str | None:
        """The new actions that the policy cannot take, after the checks have passed."""
        return self.run.out_of_reach()

    def peak_memory_bytes(self) -> int:
        """The most memory used so far, on the GPU if there is one."""
        return peak_memory_bytes(next(self.run.student.policy.parameters()).device)

    def _open_policy_and_data(self) -> str:
        run = open_policy_and_data(self.config, self._scratch / "run", Processes.from_environment())
        self._opened = run
        policy, meta = run.student.policy, run.dataset.meta
        several = parts_of(run.dataset)
        data = f"{run.dataset.describe()}, in all" if several else f"{run.dataset.repo_id},"
        features = [*policy.config.input_features, *policy.config.output_features]
        parameters = sum(p.numel() for p in policy.parameters())
        return (
            f"{run.student.policy_type}, {parameters / 1e6:.2f}M parameters, all weights loaded; "
            f"{data} {meta.total_episodes} episodes, {meta.total_frames} frames; "
            f"features {', '.join(features)}"
        )

    def _describe_statistics(self) -> str:
        choice = self.run.statistics
        if choice is None or not choice.features:
            return "the policy normalises nothing"
        return " ".join([*choice.sentences(), choice.units(self.output_kind).capitalize() + "."])

    def _open_terms(self) -> str:
        cache, origin = self.config.cache, str(self.config.cache)
        if makes_anchors(self.config, cache_given=self._cache_given):
            cache, origin = self._make_few_anchors()
        self._opened = open_run_terms(self.run, cache)
        anchors = self._terms.anchors
        if anchors is None:
            return "no cache is needed: weights are held"
        if isinstance(anchors, LiveAnchors):
            self.anchors = anchors.to_json()
            origin = f"no cache: {anchors.plan.about}, drawn anew at every step; {anchors.cost}"
        manifest = anchors.manifest
        held = ", ".join(manifest.kinds)
        if manifest.layers:
            layers = ", ".join(str(layer) for layer in manifest.layers)
            held += f" (layers {layers} of {manifest.layer_count} in {manifest.stack}, "
            held += f"{manifest.pooling})"
        weights = manifest.teacher.weights_digest[:12]
        return (
            f"{origin}: {len(anchors)} rows of {held}, {anchors.batch_size} a step; "
            f"weights {weights}"
        )

    def _check_start(self) -> str:
        check = check_start(self.run, self._terms)
        if check is None:
            return f"nothing to compare with in --mode {self.config.mode}"
        if self.config.other_student:
            return f"not required of another student: {check.drift:.3g} of the variance"
        return f"{check.drift:.2g} of the teacher's variance (rounding allows {check.tolerance:g})"

    def _check_reach(self) -> str:
        student = self.run.student
        reach, self._opened = check_reach(self.run, self._terms)
        frozen = self.run.froze_downstream
        idle = describe_idle(reach)
        return (
            f"{describe_share(reach, frozen=frozen)}: "
            f"{describe_trainable(student.policy, student.adapter, reach, frozen=frozen)}; "
            + describe_downstream(reach, frozen=frozen)
            + (f"; {idle}" if idle else "")
        )

    @property
    def _terms(self) -> RetentionTerms:
        if self.run.terms is None:
            raise RuntimeError("the cache was not opened")
        return self.run.terms

    def _make_few_anchors(self) -> tuple[Location, str]:
        """A temporary cache of a few of the anchors that the run would make."""
        plan = plan_own_anchors(self.run)
        share = self.run.student.adapter.samples_per_anchor
        anchors = self.config.anchors_a_step(share, varied=plan.varied)
        trial = plan.trial(max(_TRIAL_ROWS, 2 * anchors))
        self.anchors = {
            "source": plan.source,
            "about": plan.about,
            "expectation": plan.expectation,
            "rows": plan.config.rows,
        }
        own = make_anchors(
            trial,
            self.run.student.as_teacher(),
            self._scratch,
            on_rows=lambda _: None,
            record=self._record,
        )
        return own.cache, f"the run makes {plan.about}; tried with a temporary cache"
