"""Sweeps: the arms and seeds of one TOML file, trained and evaluated, to be compared.

- `sweep_file`: the file and its checks; `read_sweep` reads it
- `plan`: the caches, runs and evaluations that a sweep needs, and their folders
- `jobs`: does one of these, or finds that it was done before
- `runner`: `run_sweep` does everything that is not done yet
- `progress`: reports which job is running and how long the rest will take
"""

from typing import TYPE_CHECKING

from craftcli.lazy_names import lazy_names

if TYPE_CHECKING:
    from craftcli.sweeps.plan import SweepPlan, plan_sweep
    from craftcli.sweeps.progress import Job
    from craftcli.sweeps.runner import SweepResult, run_sweep
    from craftcli.sweeps.sweep_file import SweepSpec, read_sweep

__all__ = [
    "Job",
    "SweepPlan",
    "SweepResult",
    "SweepSpec",
    "plan_sweep",
    "read_sweep",
    "run_sweep",
]

# A file is read and checked without torch; running it needs everything.
__getattr__ = lazy_names(
    __name__,
    {
        "Job": "progress",
        "SweepPlan": "plan",
        "SweepResult": "runner",
        "SweepSpec": "sweep_file",
        "plan_sweep": "plan",
        "read_sweep": "sweep_file",
        "run_sweep": "runner",
    },
)
