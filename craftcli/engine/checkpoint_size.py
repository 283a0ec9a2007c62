"""How much disk a checkpoint takes, before one is written."""

from typing import Any

from torch import Tensor

from craftcli.policies.lerobot.checkpoint import Checkpoint

_OPTIMIZER_STATES = 2
"""Adam keeps two numbers for each trained one; LeRobot's presets are all of its kind."""


def checkpoint_bytes(student: Checkpoint) -> int:
    """About the size of a checkpoint: the weights that are saved, and the optimizer's state."""
    trained = [p for p in student.policy.parameters() if p.requires_grad]
    # With LoRA the policy's own weights are not saved again.
    saved = trained if student.peft is not None else student.policy.state_dict().values()
    return _bytes(saved) + _OPTIMIZER_STATES * _bytes(trained)


def _bytes(tensors: Any) -> int:
    def size(tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    return sum(map(size, tensors))
