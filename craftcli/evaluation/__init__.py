"""Evaluation: what a policy kept and learned after fine-tuning.

- `subject`: the policy to evaluate, the run that made it, and the plan of what to measure
- `evaluate`: measures everything that is planned
- `drift`, `action_error`: distance from the teacher in hidden states and in actions
- `dataset_loss`: the policy's own training loss on a dataset
- `instruction_check`: whether the policy reads its instructions
- `rollouts`, `parallel_worlds`, `simulators`: closed-loop success in simulation
- `teacher_success`: the success of a run's teacher, measured once
- `while_training`: measures a policy between the steps of its training
- `recording`: what a policy sees when it acts itself, for anchors without old data
- `results`: the results as dataclasses and as a JSON file (light: no torch)
- `cache_check`: whether a cache still belongs to its teacher and dataset
- `run_check`: what a run is, whether it is whole, and what it depends on
"""

from typing import TYPE_CHECKING

from craftcli.lazy_names import lazy_names

if TYPE_CHECKING:
    from craftcli.evaluation.drift import measure_drift
    from craftcli.evaluation.evaluate import Amounts, evaluate_policy
    from craftcli.evaluation.results import Evaluation, Success
    from craftcli.evaluation.rollouts import rollout
    from craftcli.evaluation.simulators.by_name import open_environments
    from craftcli.evaluation.subject import Plan, Subject, open_subject

__all__ = [
    "Amounts",
    "Evaluation",
    "Plan",
    "Subject",
    "Success",
    "evaluate_policy",
    "measure_drift",
    "open_environments",
    "open_subject",
    "rollout",
]

# `results` is light, and so are the processes that only simulate; the rest imports torch.
__getattr__ = lazy_names(
    __name__,
    {
        "Amounts": "evaluate",
        "Evaluation": "results",
        "Plan": "subject",
        "Subject": "subject",
        "Success": "results",
        "evaluate_policy": "evaluate",
        "measure_drift": "drift",
        "open_environments": "simulators.by_name",
        "open_subject": "subject",
        "rollout": "rollouts",
    },
)
