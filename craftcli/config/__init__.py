"""Settings of the commands; nothing in here imports anything heavy.

settings         how settings work: declared, validated, chosen by flag, file, demo or default
policy_and_data  which policy and dataset; shared by the commands below
cache            `craft cache build`
inspect          `craft cache inspect`
inspect_run      `craft inspect`
retention        the retention constraint, also for a training loop of your own
train            `craft train` and `craft dryrun`
run_paths        paths in the settings of a run, recorded and found again
dataset_list     lists of datasets with weights
parsing          text values with a structure of their own, such as --lora and --rename
unused           finds settings that have no effect beside the others
records          frozen dataclasses as JSON
"""

from craftcli.config.cache import CacheConfig
from craftcli.config.inspect import InspectConfig
from craftcli.config.parsing import LoraSpec
from craftcli.config.policy_and_data import PolicyAndData
from craftcli.config.retention import RetentionConfig
from craftcli.config.settings import Settings, Source, resolve, setting
from craftcli.config.train import TrainConfig

__all__ = [
    "CacheConfig",
    "InspectConfig",
    "LoraSpec",
    "PolicyAndData",
    "RetentionConfig",
    "Settings",
    "Source",
    "TrainConfig",
    "resolve",
    "setting",
]
