"""Keeps the summary of a run up to date: what it works on, its time and its peak memory."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from craftcli.cache.format import Manifest
from craftcli.engine.retention.anchors import NumberedAnchors
from craftcli.engine.summary_file import RunSummary
from craftcli.engine.verdict import Verdict
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.identity import dataset_identity, weights_digest
from craftcli.system.memory import peak_bytes, reset_peak


class SummaryKeeper:
    """Keeps the summary of a run up to date while it trains."""

    def __init__(self, run: Path, begun: RunSummary, device: torch.device) -> None:
        """`begun` is the summary of a new run, or that of the earlier part of a resumed one."""
        self._run = run
        self._begun = begun
        self._device = device
        self._started = time.perf_counter()
        forget_peak_memory(device)
        begun.write(run)

    def saved(
        self, step: int, *, skipped: int, verdict: Verdict, stopped_early: bool = False
    ) -> None:
        """Update the summary after a checkpoint."""
        now = replace(
            self._begun,
            steps_done=step,
            skipped=skipped,
            stopped_early=stopped_early,
            verdict=verdict.to_json(),
            seconds=self._begun.seconds + time.perf_counter() - self._started,
            peak_memory_bytes=max(self._begun.peak_memory_bytes, peak_memory_bytes(self._device)),
        )
        now.write(self._run)


def keep_summary(
    run: Path,
    *,
    steps: int,
    student: Checkpoint,
    dataset: Any,
    anchors: NumberedAnchors | None,
    steps_done: int | None,
) -> SummaryKeeper | None:
    """Start the summary of a run, or continue that of a resumed run; None if it has none.

    `steps_done` is None for a new run.
    """
    device = next(student.policy.parameters()).device
    if steps_done is not None:
        left = RunSummary.read(run)
        # Fewer than it has if the run was resumed from an earlier checkpoint.
        if left is None:
            return None
        return SummaryKeeper(run, replace(left, steps=steps, steps_done=steps_done), device)
    manifest = anchors.manifest if anchors else None
    data = dataset_identity(dataset, [])
    parameters = list(student.policy.parameters())
    begun = RunSummary(
        steps=steps,
        steps_done=0,
        seconds=0.0,
        peak_memory_bytes=0,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        anchors=len(anchors) if anchors else None,
        anchor_targets=describe_targets(manifest) if manifest else None,
        anchor_dataset=manifest.dataset.fingerprint if manifest else None,
        teacher=manifest.teacher.weights_digest
        if manifest
        else weights_digest(*student.weight_files),
        teacher_source=student.source,
        dataset=data.repo_id,
        dataset_fingerprint=data.fingerprint,
    )
    return SummaryKeeper(run, begun, device)


def describe_targets(manifest: Manifest) -> dict[str, Any]:
    """What a cache holds of its teacher: with its size and seed, what identifies it."""
    return {
        "kinds": list(manifest.kinds),
        "stack": manifest.stack,
        "layers": list(manifest.layers),
        "pooling": manifest.pooling,
        "sampling": manifest.sampling,
        "actions": manifest.actions,
    }


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far, on the GPU if the device is one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_bytes()


def forget_peak_memory(device: torch.device) -> None:
    """Reset the peak where the system allows it: several runs may share a process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak()
