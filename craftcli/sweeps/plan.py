"""The plan of a sweep: the caches and runs that it needs, and their folders."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from craftcli.choices import Kind
from craftcli.config.cache import CacheConfig
from craftcli.config.parsing import JOINED
from craftcli.config.policy_and_data import DEMO
from craftcli.config.settings import read_settings, resolve
from craftcli.config.train import TrainConfig
from craftcli.demo.defaults import DEMO_TRAINING
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.sweeps.sweep_file import ArmSpec, InterpolationSpec, SweepSpec

_TEACHER = ("policy", "revision", "trust_remote_code", "device")
HELD_OUT_SEED = 1_000_003
"""Seed of the held-out anchors, far from the seeds that people choose."""


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """One arm with one seed: a training run, or the interpolation of one."""

    arm: str
    seed: int
    folder: Path
    config: TrainConfig | None
    """None for an interpolation."""
    cache: CacheConfig | None
    """The cache that the run holds, if the sweep builds it."""
    interpolation: InterpolationSpec | None = None
    base: Path | None = None
    """The run that is interpolated."""
    trust_remote_code: bool = False
    """Whether the sweep file allows code that comes with the tokenizers of that run."""


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """Everything to do: build caches, evaluate the teacher, make and evaluate runs."""

    caches: tuple[CacheConfig, ...]
    runs: tuple[RunJob, ...]
    drift_cache: Path | None
    """The cache on which the drift of all arms is measured."""
    teacher: str
    trust_remote_code: bool
    """Whether the sweep file allows code that comes with the policy's tokenizers."""
    device: str
    environments: tuple[str, ...]
    old_environments: tuple[str, ...]
    """Those of the old skill, in which a run acts with the teacher's processors if it has both."""
    amounts: Mapping[str, int]
    """Number of episodes and so on; those left out have the default of craft eval."""


def plan_sweep(spec: SweepSpec) -> SweepPlan:
    """Plan a sweep; settings that are wrong fail here, before anything runs.

    Raises:
        CraftError: a setting is wrong, or an interpolation has no run.
    """
    spec = _with_kinds(spec)
    caches: dict[Path, CacheConfig] = {}
    runs: list[RunJob] = []
    for arm in sorted(spec.arms, key=lambda arm: arm.interpolation is not None):
        for seed in arm.seeds or spec.seeds:
            make = _interpolation_job if arm.interpolation else _training_job
            job = make(spec, arm, seed)
            if job.cache:
                caches.setdefault(Path(str(job.cache.output)), job.cache)
            runs.append(job)
    _check_interpolations(runs)
    drift_cache = _with_frames(caches, of=None) or next(iter(caches), None)
    if spec.held_out is not None:
        own = {"seed": HELD_OUT_SEED, **spec.held_out}
        shared = _with_frames(caches, of=_cache(spec, own))
        held_out = _cache(spec, {"exclude": shared, **own})
        drift_cache = Path(str(held_out.output))
        caches[drift_cache] = held_out
    environments = _environments(spec)
    return SweepPlan(
        caches=tuple(caches.values()),
        runs=tuple(runs),
        drift_cache=drift_cache,
        teacher=spec.train.get("policy", DEMO),
        trust_remote_code=spec.train.get("trust_remote_code", False),
        device=spec.train.get("device", "auto"),
        environments=tuple(name for name in environments if name not in spec.old),
        old_environments=tuple(name for name in environments if name in spec.old),
        amounts=spec.eval.amounts,
    )


def _with_kinds(spec: SweepSpec) -> SweepSpec:
    """Unless [cache] has a `kind`, choose one that serves all arms, so that they share caches."""
    if "kind" in spec.cache:
        return spec
    named = {
        mode
        for arm in spec.arms
        if arm.interpolation is None
        for mode in str({"mode": TrainConfig.mode, **spec.train, **arm.train}["mode"]).split(JOINED)
    }
    kinds = [kind for kind in Kind if kind in named or kind is Kind.HIDDEN]
    return replace(spec, cache={**spec.cache, "kind": JOINED.join(kinds)})


def folder_of(spec: SweepSpec, arm: str, seed: int) -> Path:
    """The folder of a run; a name with characters that folders cannot have gets a digest."""
    plain = re.sub(r"[^\w.+=-]+", "-", arm).strip("-.") or "arm"
    if plain != arm.replace(" ", "-"):
        plain += "-" + hashlib.sha256(arm.encode()).hexdigest()[:6]
    return spec.output / "runs" / plain / f"seed-{seed}"


def _training_job(spec: SweepSpec, arm: ArmSpec, seed: int) -> RunJob:
    folder = folder_of(spec, arm.name, seed)
    flags = read_settings(TrainConfig, {**spec.train, **arm.train}, source=f"the arm {arm.name}")
    flags |= {"seed": seed, "output": folder, "overwrite": True}
    config = resolve(TrainConfig, flags=flags, demo=DEMO_TRAINING).settings
    cache = None
    makes_anchors = config.asked_anchors or config.asks_teacher or "anchors" in flags
    if config.uses_anchors and "cache" not in flags and not makes_anchors:
        cache = _cache(spec, arm.cache)
        config = resolve(
            TrainConfig, flags={**flags, "cache": cache.output}, demo=DEMO_TRAINING
        ).settings
    return RunJob(arm=arm.name, seed=seed, folder=folder, config=config, cache=cache)


def _interpolation_job(spec: SweepSpec, arm: ArmSpec, seed: int) -> RunJob:
    interpolation = arm.interpolation
    return RunJob(
        arm=arm.name,
        seed=seed,
        folder=folder_of(spec, arm.name, seed),
        config=None,
        cache=None,
        interpolation=interpolation,
        base=folder_of(spec, interpolation.of, seed) if interpolation else None,
        trust_remote_code=spec.train.get("trust_remote_code", False),
    )


def _check_interpolations(runs: list[RunJob]) -> None:
    folders = {job.folder for job in runs}
    missing = [job for job in runs if job.base and job.base not in folders]
    if missing:
        raise CraftError(
            "The sweep is not valid.",
            why=" ".join(
                f"{job.arm} needs seed {job.seed} of {job.interpolation.of}, which is not trained."
                for job in missing
                if job.interpolation
            ),
            fix="give both arms the same seeds.",
            exit_code=EXIT_USAGE,
        )


def _cache(spec: SweepSpec, own: Mapping[str, Any]) -> CacheConfig:
    """The settings of a cache, in a folder named by a digest of what decides its content."""
    teacher = {name: spec.train[name] for name in _TEACHER if name in spec.train}
    values = read_settings(CacheConfig, {**teacher, **spec.cache, **own}, source="[cache]")
    config = CacheConfig(**values)
    content = {n: v for n, v in config.to_json().items() if n not in config.neutral()}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    return CacheConfig(**{**values, "output": spec.output / "caches" / f"{digest}.zarr"})


def _with_frames(caches: Mapping[Path, CacheConfig], of: CacheConfig | None) -> Path | None:
    """The first cache with frames of a dataset, or of the dataset of the cache `of`.

    Rows that were made without a dataset, or of another one, share no frame with held-out ones.
    """
    for path, cache in caches.items():
        same = of is None or (cache.dataset, cache.dataset_root) == (of.dataset, of.dataset_root)
        if cache.needs_dataset and same:
            return path
    return None


def _environments(spec: SweepSpec) -> tuple[str, ...]:
    """The environments in which policies are rolled out."""
    if spec.eval.env:
        return spec.eval.env
    return (DEMO,) if spec.train.get("policy", DEMO) == DEMO else (*spec.old, *spec.new)
