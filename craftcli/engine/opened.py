"""A run with everything it works on open: a new one, or one that goes on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craftcli.cache.processes import Processes
from craftcli.config import TrainConfig
from craftcli.engine.opening import open_retention
from craftcli.engine.resuming import Resumed, read_run
from craftcli.engine.retention import Retention
from craftcli.engine.run_folder import check_output, default_output
from craftcli.engine.session import choose_device, open_student, open_task_data
from craftcli.engine.trainer import Trainer
from craftcli.policies.loading import Checkpoint, load_checkpoint
from craftcli.policies.memory import save_memory
from craftcli.report.trackers import require_tracker


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """What `craft train` works on."""

    config: TrainConfig
    student: Checkpoint
    retention: Retention | None
    trainer: Trainer
    resumed: Resumed | None


def open_run(config: TrainConfig, given: Mapping[str, Any], processes: Processes) -> OpenedRun:
    """Open the policy, the anchors and the data; `given` are settings from the command line."""
    resumed = read_run(config.resume, given, processes) if config.resume else None
    require_tracker(resumed.config.tracker if resumed else config.tracker)
    if resumed:
        config, output = resumed.config, resumed.run
        student = load_checkpoint(
            str(resumed.checkpoint),
            device=choose_device(config.device),
            trust_remote_code=config.trust_remote_code,
        )
    else:
        output = Path(processes.agree(str(default_output(config))))
        if processes.is_first:
            check_output(output, overwrite=config.overwrite)
        student = open_student(config)
    if config.gradient_checkpointing:
        save_memory(student.policy)
    retention = None
    if config.retains:
        retention = open_retention(
            config, student, config.cache, resumed=resumed.run if resumed else None
        )
    dataset = open_task_data(config, student)
    trainer = Trainer(config, student, dataset, retention, output=output, resumed=resumed)
    return OpenedRun(
        config=config, student=student, retention=retention, trainer=trainer, resumed=resumed
    )
