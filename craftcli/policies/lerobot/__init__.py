"""LeRobot's checkpoints, datasets and training state.

checkpoint       open a policy with its processors (`load_checkpoint`)
policy_files     what a policy folder may contain, checked before LeRobot reads it
processor_files  open the processors of a folder, with tokenizers saved beside them
loading          load weights without a second copy of them
weight_files     read tensors one by one; check that every weight was loaded
lora_files       checkpoints that hold only LoRA weights
lora             add LoRA weights to a policy, or fold them into it
remote_code      refuse Python code that comes with a tokenizer
datasets         open a dataset for a policy (`open_dataset`)
batches          read rows and endless batches of it
several_datasets several datasets as one (`SeveralDatasets`)
joined_metadata  their metadata and statistics together
apart_statistics each dataset of a list normalised with its own statistics
weighted_sampler draw frames of several datasets by weights
fast_rows        read its numbers from the Arrow table
image_variation  random changes of an image, by a seed
statistics       choose between a teacher's statistics and a dataset's
task_processors  the processors of a new task beside the teacher's
input_statistics statistics of a policy's normaliser, and inputs drawn from them
instructions     whether a policy reads instructions; those of a dataset
identity         digests of teacher, processor and dataset
action_range     a warning about actions that the normaliser clips
history          observation queues of policies that act on several frames
saving           writes checkpoints, and reads the optimizer of one
training         optimizer, schedule, and the layout of a run's checkpoints
catalogue        the content of `craft info --policies`
"""

from craftcli.policies.lerobot.batches import TaskBatches, read_rows
from craftcli.policies.lerobot.catalogue import FamilyInfo, PolicyInfo, all_families, policy_info
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset
from craftcli.policies.lerobot.identity import dataset_identity, teacher_identity
from craftcli.policies.lerobot.lora import add_lora, fold_lora

__all__ = [
    "Checkpoint",
    "FamilyInfo",
    "PolicyInfo",
    "TaskBatches",
    "add_lora",
    "all_families",
    "dataset_identity",
    "fold_lora",
    "load_checkpoint",
    "open_dataset",
    "policy_info",
    "read_rows",
    "teacher_identity",
]
