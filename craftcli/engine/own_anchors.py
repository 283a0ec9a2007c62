"""Anchors that a run makes for itself when it is given no cache.

The cache lies beside the run. Its name is a digest of the teacher and of what it is made of, so
that other runs find it. `anchor_plan` chooses what it is made of.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from craftcli.cache.build.build import build_cache
from craftcli.cache.build.recorded_rows import RecordedFrames
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.by_location import open_destination
from craftcli.cache.summary import summarize
from craftcli.choices import Anchors
from craftcli.config.cache import CacheConfig
from craftcli.config.policy_and_data import PolicyAndData
from craftcli.config.settings import option_name
from craftcli.config.train import DEFAULT_CACHE, TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.anchor_plan import AnchorPlan
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.identity import dataset_identity, teacher_identity
from craftcli.policies.lerobot.task_processors import fit_to, own_sizes

type Recorder = Callable[[CacheConfig, Checkpoint], RecordedFrames]
"""Lets a policy act in the environments of the settings, as `evaluation.recording` does."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnAnchors:
    """A cache of anchors that a run made or found."""

    plan: AnchorPlan
    cache: Path
    rows: int
    size_bytes: int
    seconds: float
    """Time to build it; 0 if it was there."""
    reused: bool
    """Whether an earlier run had built it."""
    invalid: int = 0
    """Rows on which the teacher is not finite; they are not trained on."""

    def to_json(self) -> dict[str, Any]:
        """The anchors as JSON values."""
        return {
            "source": self.plan.source,
            "about": self.plan.about,
            "expectation": self.plan.expectation,
            "cache": str(self.cache),
            "rows": self.rows,
            "invalid": self.invalid,
            "size_bytes": self.size_bytes,
            "seconds": self.seconds,
            "reused": self.reused,
        }


def makes_anchors(config: TrainConfig, *, cache_given: bool) -> bool:
    """Whether a new run makes its own anchors; `cache_given`, whether the user named a cache.

    Raises:
        CraftError: the settings name a cache and something to make anchors of.
    """
    if not config.uses_anchors or config.anchors is Anchors.CACHE:
        return False
    named = cache_given or config.cache != DEFAULT_CACHE
    asked = [option_name(name) for name in config.asked_anchors]
    if config.asks_teacher:
        asked.insert(0, "--teacher live")
    if named and asked:
        raise CraftError(
            "These settings contradict each other.",
            why=f"--cache {config.cache} holds the anchors, and {', '.join(asked)} would make "
            "others.",
            fix="leave one of them out.",
            exit_code=EXIT_USAGE,
        )
    if config.asks_teacher:
        return False
    return bool(asked) or not (named or _left_by_a_build(DEFAULT_CACHE))


def make_anchors(
    plan: AnchorPlan,
    teacher: Checkpoint,
    folder: Path,
    *,
    on_rows: Callable[[int], None],
    record: Recorder | None = None,
) -> OwnAnchors:
    """Build the cache in a folder, continue an interrupted build of it, or find it complete.

    `record` lets the policy act, for a plan with environments.
    Under torchrun every process calls this and computes its share.
    """
    with own_sizes(teacher):
        return _make_anchors(plan, teacher, folder, on_rows, record)


def _make_anchors(
    plan: AnchorPlan,
    teacher: Checkpoint,
    folder: Path,
    on_rows: Callable[[int], None],
    record: Recorder | None,
) -> OwnAnchors:
    cache = folder / f"anchors-{_digest(plan, teacher)[:12]}.zarr"
    destination = open_destination(cache)
    state = "complete" if cache.exists() else "begun" if destination.interrupted_build() else "new"
    # A process that looks later than the others may see what they have begun.
    processes = Processes.from_environment()
    state = processes.agree(state)
    started = time.perf_counter()
    invalid = 0
    if state != "complete":
        data = _recorded(plan, teacher, record) if plan.config.env else plan.dataset
        report = build_cache(
            replace(plan.config, output=cache, resume=state == "begun"),
            teacher,
            data,
            on_plan=lambda _: None,
            on_rows=on_rows,
            prompts=plan.prompts,
        )
        invalid = len(report.invalid)
        # The first process moves the complete cache to its path.
        processes.wait()
    summary = summarize(CacheReader.open(cache))
    return OwnAnchors(
        plan=plan,
        cache=cache,
        rows=summary.rows,
        size_bytes=summary.size_bytes,
        seconds=0.0 if state == "complete" else time.perf_counter() - started,
        reused=state == "complete",
        invalid=invalid,
    )


def _recorded(plan: AnchorPlan, teacher: Checkpoint, record: Recorder | None) -> RecordedFrames:
    if record is None:
        raise RuntimeError("nothing was given that records episodes")
    recorded = record(plan.config, teacher)
    plan.require_old(dict.fromkeys(frame.task for frame in recorded.frames))
    return recorded


def _digest(plan: AnchorPlan, policy: Checkpoint) -> str:
    """Digest of all that decides the rows: the teacher, the data, the settings, the device."""
    teacher = teacher_identity(fit_to(policy, plan.normalised, plan.config.stats).policy)
    places = {field.name for field in fields(PolicyAndData)} - {"rename", "seed"}
    unneeded = places | plan.config.neutral()
    settings = {name: v for name, v in plan.config.to_json().items() if name not in unneeded}
    content = [
        [teacher.weights_digest, teacher.config_digest, teacher.processor_digest, teacher.dtype],
        None if plan.dataset is None else dataset_identity(plan.dataset, []).fingerprint,
        plan.prompts.lines,
        settings,
        # An interrupted build continues on the same kind of device only.
        next(policy.policy.parameters()).device.type,
    ]
    if getattr(plan.dataset, "is_weighted", False):
        content.append(plan.dataset.shares)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _left_by_a_build(cache: Path) -> bool:
    """Whether there is a cache, or what a running or a killed build leaves of one."""
    names = (cache, *(cache.with_name(cache.name + end) for end in (".partial", ".replaced")))
    return any(os.path.lexists(name) for name in names)
