"""The training engine: fine-tunes a policy on a new task under the retention constraint.

- `run`: opens and checks a run; `dryrun` reports the same steps as numbered checks.
- `anchor_plan`, `own_anchors`: the anchors that a run makes for itself, if it has no cache.
- `trainer`: the training loop; `step`: one step of it.
- `insulation`: keeps the task's gradient out of a vision-language model.
- `execution`: precision, gradient accumulation, several processes; `sharding`: FSDP2 by units;
  `transfers`: values that the host reads from the device, and inputs that it copies there.
- `method/`: the mathematics (losses, projection, multiplier, budget).
- `retention/`: what the student is held to, and how it is opened.
- `run_on_disk`: what a run keeps while it trains; `run_folder`, `run_files`, `run_lock`,
  `summary_file`, `summary`: its folder, and who writes what of it.
- `checkpoints`, `checkpoint_manifest`, `checkpoint_size`: checkpoints with digests of all they
  need, and how large they are.
- `dependencies`, `outside`, `outside_files`, `file_digests`: what a run needs outside its folder,
  and whether that has changed.
- `saved_steps`: the checkpoints of a run, and which of them lerobot-train wrote.
- `resuming`: a run that is continued; `failed_step`: takes a step that failed back.
- `watch`: measurements between steps, the best checkpoint, early stopping; `kept_checkpoints`:
  which checkpoints stay.
- `metrics`, `trackers`: measurements of steps, and where they go.
- `budget_record`, `judging`, `verdict`: how L_ret kept to its budget over a run.
- `ending`: when a run ends, SIGINT and SIGTERM included.
- `weight_interpolation`, `interpolated_policy`, `merge_output`: policies between a student and
  its teacher.

`run_folder`, `run_files`, `run_lock`, `checkpoint_manifest`, `outside`, `outside_files`,
`file_digests`, `kept_checkpoints`, `merge_output`, `resuming`, `saved_steps`, `summary_file` and
`verdict` are light; everything else imports torch.
"""

from typing import TYPE_CHECKING

from craftcli.lazy_names import lazy_names

if TYPE_CHECKING:
    from craftcli.engine.dryrun import Check, DryRun
    from craftcli.engine.interpolated_policy import plan_interpolation, write_interpolation
    from craftcli.engine.metrics import LogEntry, RetentionReport, StepReport
    from craftcli.engine.retention.retention import Retention
    from craftcli.engine.run import OpenedRun, open_run, prepare
    from craftcli.engine.summary_file import RunSummary
    from craftcli.engine.trainer import RunResult, Trainer
    from craftcli.engine.verdict import Outcome, Verdict

__all__ = [
    "Check",
    "DryRun",
    "LogEntry",
    "OpenedRun",
    "Outcome",
    "Retention",
    "RetentionReport",
    "RunResult",
    "RunSummary",
    "StepReport",
    "Trainer",
    "Verdict",
    "open_run",
    "plan_interpolation",
    "prepare",
    "write_interpolation",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Check": "dryrun",
        "DryRun": "dryrun",
        "LogEntry": "metrics",
        "OpenedRun": "run",
        "Outcome": "verdict",
        "Retention": "retention.retention",
        "RetentionReport": "metrics",
        "RunResult": "trainer",
        "RunSummary": "summary_file",
        "StepReport": "metrics",
        "Trainer": "trainer",
        "Verdict": "verdict",
        "open_run": "run",
        "plan_interpolation": "interpolated_policy",
        "prepare": "run",
        "write_interpolation": "interpolated_policy",
    },
)
