"""Keeping the summary of a run: what it works on, and what it has cost so far."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from craftcli.cache.format import Manifest
from craftcli.engine.peak_memory import forget_peak_memory, peak_memory_bytes
from craftcli.engine.retention import Retention
from craftcli.policies.identity import dataset_identity, weights_digest
from craftcli.policies.loading import Checkpoint
from craftcli.report.run_summary import RunSummary


class SummaryKeeper:
    """Keeps the summary of a run up to date while it trains."""

    def __init__(self, run: Path, begun: RunSummary, device: torch.device) -> None:
        """`begun` is the summary of a new run, or what an earlier part of it left."""
        self._run = run
        self._begun = begun
        self._device = device
        self._started = time.perf_counter()
        forget_peak_memory(device)
        begun.write(run)

    def saved(self, step: int) -> None:
        """A checkpoint was written."""
        now = replace(
            self._begun,
            steps_done=step,
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
    retention: Retention | None,
    resumed: bool,
) -> SummaryKeeper | None:
    """Begin the summary of a run, or go on with it; None if an earlier part of it left none."""
    device = next(student.policy.parameters()).device
    if resumed:
        left = RunSummary.read(run)
        return SummaryKeeper(run, left, device) if left else None
    anchors = retention.anchors if retention else None
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
    """What tells two caches of the same teacher and size apart, but for the seed."""
    return {
        "kinds": list(manifest.kinds),
        "stack": manifest.stack,
        "layers": list(manifest.layers),
        "pooling": manifest.pooling,
        "sampling": manifest.sampling,
        "actions": manifest.actions,
    }
