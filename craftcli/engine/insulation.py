"""Knowledge insulation (Driess et al. 2025): no gradient of the action expert reaches the VLM.

The expert attends to keys and values of the vision-language model. This is the only path from the
loss of the actions to that model, and the paper stops the gradient there. Its model then learns
from a second loss, on discrete action tokens. LeRobot's pi0, pi05 and smolvla have no such loss, so
that nothing is left to train it: stopping the gradient and freezing the model are the same, and
freezing costs neither a backward pass nor optimizer state.
"""

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.lerobot.checkpoint import Checkpoint


def insulate(student: Checkpoint) -> None:
    """Freeze the vision-language model of a policy with an action expert, LoRA weights included.

    Raises:
        CraftError: the policy has no expert, or nothing is left to train.
    """
    model = student.adapter.language_model(student.policy)
    if model is None:
        raise CraftError(
            "--insulate cannot be used with this policy.",
            why="craft knows no action expert beside a vision-language model in "
            f"{student.policy_type}.",
            fix="leave it out; pi0, pi05 and smolvla have one.",
            exit_code=EXIT_USAGE,
        )
    model.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in student.policy.parameters()):
        raise CraftError(
            "--insulate leaves nothing to train.",
            why="all weights that would be trained are in the vision-language model.",
            fix="name targets in the action expert with --lora, as in targets=*expert*.q_proj.",
            exit_code=EXIT_USAGE,
        )
