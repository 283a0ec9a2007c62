"""The jobs of a sweep: which caches, runs, merges and evaluations it takes, and where they go."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from craftcli.choices import Kind
from craftcli.config import DEMO, JOINED, CacheConfig, TrainConfig
from craftcli.demo.defaults import DEMO_TRAINING
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.settings import read_settings, resolve
from craftcli.sweeps.spec import ArmSpec, MergeSpec, SweepSpec

# Where a cache goes and how quickly it is made says nothing about what is in it.
_NOT_CONTENT = ("output", "overwrite", "resume", "device")
_TEACHER = ("policy", "revision", "device")
HELD_OUT_SEED = 1_000_003
"""Of the draw of held-out anchors, far from the seeds that people choose."""


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """One arm with one seed: training, or a merge of what another job trained."""

    arm: str
    seed: int
    folder: Path
    config: TrainConfig | None
    """None for a merge."""
    cache: CacheConfig | None
    """The cache that the run is held to, if any."""
    merge: MergeSpec | None = None
    base: Path | None = None
    """The run that is merged."""


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """Everything to do, in order: caches, the teacher's evaluation, runs with theirs."""

    caches: tuple[CacheConfig, ...]
    runs: tuple[RunJob, ...]
    drift_cache: Path | None
    """The cache that all arms' drift is measured on."""
    teacher: str
    device: str
    environments: tuple[str, ...]
    amounts: Mapping[str, int]
    """Of episodes and so on, as far as they were decided."""


def plan_sweep(spec: SweepSpec) -> SweepPlan:
    """Find every problem with the settings before anything is run."""
    spec = _with_kinds(spec)
    caches: dict[Path, CacheConfig] = {}
    runs: list[RunJob] = []
    for arm in sorted(spec.arms, key=lambda arm: arm.merge is not None):
        for seed in arm.seeds or spec.seeds:
            job = _merge_job(spec, arm, seed) if arm.merge else _run_job(spec, arm, seed)
            if job.cache:
                caches.setdefault(Path(str(job.cache.output)), job.cache)
            runs.append(job)
    _check_merges(runs)
    measured_on = next(iter(caches), None)
    if spec.held_out is not None:
        held_out = _cache(spec, {"seed": HELD_OUT_SEED, "exclude": measured_on, **spec.held_out})
        measured_on = Path(str(held_out.output))
        caches[measured_on] = held_out
    return SweepPlan(
        caches=tuple(caches.values()),
        runs=tuple(runs),
        drift_cache=measured_on,
        teacher=spec.train.get("policy", DEMO),
        device=spec.train.get("device", "auto"),
        environments=_environments(spec),
        amounts=spec.eval.amounts,
    )


def _with_kinds(spec: SweepSpec) -> SweepSpec:
    """Let the caches hold what all arms need of them, unless it was said: they can share one."""
    if "kind" in spec.cache:
        return spec
    named = {
        mode
        for arm in spec.arms
        if arm.merge is None
        for mode in str({"mode": TrainConfig.mode, **spec.train, **arm.train}["mode"]).split(JOINED)
    }
    kinds = [kind for kind in Kind if kind in named or kind is Kind.HIDDEN]
    return replace(spec, cache={**spec.cache, "kind": JOINED.join(kinds)})


def folder_of(spec: SweepSpec, arm: str, seed: int) -> Path:
    """Where a run goes; arms whose names differ only in signs get a digest to tell them apart."""
    plain = re.sub(r"[^\w.+=-]+", "-", arm).strip("-.") or "arm"
    if plain != arm.replace(" ", "-"):
        plain += "-" + hashlib.sha256(arm.encode()).hexdigest()[:6]
    return spec.output / "runs" / plain / f"seed-{seed}"


def _run_job(spec: SweepSpec, arm: ArmSpec, seed: int) -> RunJob:
    folder = folder_of(spec, arm.name, seed)
    flags = read_settings(TrainConfig, {**spec.train, **arm.train}, source=f"the arm {arm.name}")
    flags |= {"seed": seed, "output": folder, "overwrite": True}
    config = resolve(TrainConfig, flags=flags, demo=DEMO_TRAINING).settings
    cache = None
    if config.uses_anchors and "cache" not in flags:
        cache = _cache(spec, arm.cache)
        config = resolve(
            TrainConfig, flags={**flags, "cache": cache.output}, demo=DEMO_TRAINING
        ).settings
    return RunJob(arm=arm.name, seed=seed, folder=folder, config=config, cache=cache)


def _merge_job(spec: SweepSpec, arm: ArmSpec, seed: int) -> RunJob:
    merge = arm.merge
    return RunJob(
        arm=arm.name,
        seed=seed,
        folder=folder_of(spec, arm.name, seed),
        config=None,
        cache=None,
        merge=merge,
        base=folder_of(spec, merge.of, seed) if merge else None,
    )


def _check_merges(runs: list[RunJob]) -> None:
    folders = {job.folder for job in runs}
    missing = [job for job in runs if job.base and job.base not in folders]
    if missing:
        raise CraftError(
            "The sweep cannot be run.",
            why=" ".join(
                f"{job.arm} merges seed {job.seed} of {job.merge.of}, which is not trained."
                for job in missing
                if job.merge
            ),
            fix="give both arms the same seeds.",
            exit_code=EXIT_USAGE,
        )


def _cache(spec: SweepSpec, own: Mapping[str, Any]) -> CacheConfig:
    """The settings of a cache, in a folder that is named by what will be in it."""
    teacher = {name: spec.train[name] for name in _TEACHER if name in spec.train}
    values = read_settings(CacheConfig, {**teacher, **spec.cache, **own}, source="[cache]")
    config = CacheConfig(**values)
    content = {n: v for n, v in config.to_json().items() if n not in _NOT_CONTENT}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    return CacheConfig(**{**values, "output": spec.output / "caches" / f"{digest}.zarr"})


def _environments(spec: SweepSpec) -> tuple[str, ...]:
    """Where policies are rolled out."""
    if spec.eval.env:
        return spec.eval.env
    return (DEMO,) if spec.train.get("policy", DEMO) == DEMO else (*spec.old, *spec.new)
