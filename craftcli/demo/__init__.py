"""The built-in demo: a small world, a real tiny pi0_fast that has learned it, and its datasets.

world                         the board, its renderer, the scripted expert, the gym environment
datasets                      the old and the new task as LeRobotDatasets, written on first use
*_tiny_pi0_fast               the policy; LeRobot finds its three modules by these names
tokenizers                    the tokenizers of prompts and actions
teacher/                      the trained checkpoint
train_teacher                 the script that trains it
defaults                      facts that need no heavy import
"""

from typing import TYPE_CHECKING

from craftcli.lazy_names import lazy_names

if TYPE_CHECKING:
    from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER, TinyPI0FastConfig
    from craftcli.demo.datasets import NEW, OLD, DemoDataset, ensure_dataset
    from craftcli.demo.defaults import DEMO_POLICY_TYPE, DEMO_TRAINING
    from craftcli.demo.modeling_tiny_pi0_fast import TinyPI0FastPolicy
    from craftcli.demo.world import BlockWorld

__all__ = [
    "DEMO_POLICY_TYPE",
    "DEMO_TRAINING",
    "NEW",
    "OLD",
    "TEACHER_FOLDER",
    "BlockWorld",
    "DemoDataset",
    "TinyPI0FastConfig",
    "TinyPI0FastPolicy",
    "ensure_dataset",
]

__getattr__ = lazy_names(
    __name__,
    {
        "BlockWorld": "world",
        "DEMO_POLICY_TYPE": "defaults",
        "DEMO_TRAINING": "defaults",
        "DemoDataset": "datasets",
        "NEW": "datasets",
        "OLD": "datasets",
        "TEACHER_FOLDER": "configuration_tiny_pi0_fast",
        "TinyPI0FastConfig": "configuration_tiny_pi0_fast",
        "TinyPI0FastPolicy": "modeling_tiny_pi0_fast",
        "ensure_dataset": "datasets",
    },
)
