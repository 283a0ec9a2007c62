"""Simulators in which policies are rolled out, behind one interface.

- `base`: the interface: `Simulation`, `StepResult`, `Environment`
- `demo`, `metaworld`, `lerobot`: the demo's block world, Meta-World, LeRobot's environments
- `names`: checks the names of environments, without importing their simulators
- `by_name`: opens environments by the names that `craft eval --env` takes
"""

from typing import TYPE_CHECKING

from craftcli.lazy_names import lazy_names

if TYPE_CHECKING:
    from craftcli.evaluation.simulators.base import Environment, Simulation, StepResult
    from craftcli.evaluation.simulators.by_name import open_environments
    from craftcli.evaluation.simulators.metaworld import MetaWorld

__all__ = ["Environment", "MetaWorld", "Simulation", "StepResult", "open_environments"]

# Processes that only simulate import `base` and one simulator, but neither torch nor LeRobot.
__getattr__ = lazy_names(
    __name__,
    {
        "Environment": "base",
        "MetaWorld": "metaworld",
        "Simulation": "base",
        "StepResult": "base",
        "open_environments": "by_name",
    },
)
