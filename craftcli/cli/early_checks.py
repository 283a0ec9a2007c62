"""Finds cheap mistakes before torch and LeRobot are imported, which takes many seconds.

Whatever is found here would be found later too, by the code that needs it.
"""

import importlib.metadata
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from craftcli.choices import Anchors
from craftcli.config.cache import CacheConfig
from craftcli.config.dataset_list import NamedDataset
from craftcli.config.parsing import split_list
from craftcli.config.policy_and_data import DEMO, DEMO_DATASETS
from craftcli.config.settings import Source
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.run_folder import CHECKPOINTS, CONFIG_FILE, LAST, check_output
from craftcli.engine.saved_steps import continued_by_lerobot, written_by_lerobot
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.local_datasets import can_only_be_local, find_local_dataset
from craftcli.local_policies import find_local_policy
from craftcli.locations import Location
from craftcli.system.libraries import has_library

_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "xla", "mtia", "meta")


def check_training(source: Source[TrainConfig]) -> None:
    """Check the settings of `craft train`."""
    config = source.settings
    if not Processes.from_environment().is_first:
        return
    if config.resume is not None:
        check_run(config.resume, step=config.from_)
        check_device(config.device)
        _check_measuring(config)
        return
    if config.output is not None:
        check_output(config.output, overwrite=config.overwrite)
    check_inputs(source)


def check_inputs(source: Source[TrainConfig]) -> None:
    """Check the device, the policy, the data and the anchors that a new run reads."""
    config = source.settings
    check_device(config.device)
    check_policy(config.policy)
    check_datasets(config.datasets, root=config.dataset_root)
    _check_measuring(config)
    if config.uses_anchors:
        _check_old(config)
    reads_cache = config.uses_anchors and not config.asks_teacher and not config.asked_anchors
    # Settings that contradict a cache are refused later, by their names.
    if reads_cache and ("cache" in source.given or config.anchors is Anchors.CACHE):
        check_cache(config.cache)


def _check_measuring(config: TrainConfig) -> None:
    """Check what a run is measured on while it trains."""
    check_environments((*split_list(config.eval_env), *split_list(config.eval_old_env)))
    if config.eval_dataset is not None:
        check_dataset(config.eval_dataset, option="--eval-dataset")


def _check_old(config: TrainConfig) -> None:
    """Check what a run makes its anchors of."""
    check_environments(split_list(config.old_env))
    check_datasets(config.old_datasets, root=config.old_dataset_root, option="--old-dataset")
    if config.old_tasks is not None:
        check_instructions(config.old_tasks)


def check_building(config: CacheConfig) -> None:
    """Check the settings of `craft cache build`, but for its output."""
    check_device(config.device)
    check_policy(config.policy)
    if config.needs_dataset:
        check_datasets(config.datasets, root=config.dataset_root)
    if config.moves_like is not None:
        check_dataset(config.moves_like, option="--moves-like")
    if config.layers is not None:
        from craftcli.cache.layers import parse_layers

        parse_layers(config.layers)
    if config.prompts is not None and not config.prompts.is_file():
        raise CraftError(
            f"Cannot read the prompts {config.prompts}.",
            why="there is no such file.",
            fix="give --prompts a text file with one instruction a line.",
            exit_code=EXIT_USAGE,
        )
    if config.exclude is not None:
        check_cache(config.exclude)
    check_environments(config.environments)


def check_evaluation(
    source: str,
    *,
    cache: Location | None,
    datasets: Mapping[str, Sequence[str]],
    environments: Sequence[str],
    device: str,
) -> None:
    """Check the arguments of `craft eval`; `datasets` are by the option that names them."""
    # A run without a checkpoint has an error of its own.
    if not (Path(source).expanduser() / CONFIG_FILE).is_file():
        check_policy(source)
    check_device(device)
    if cache is not None:
        check_cache(cache)
    for option, names in datasets.items():
        for name in names:
            check_dataset(name, option=option)
    check_environments(environments)


def check_run(run: Path, *, step: int | None) -> None:
    """Refuse to resume a folder that is not there, or what lerobot-train has trained."""
    if not run.exists():
        raise CraftError(
            f"Cannot resume {run}: there is no such run.",
            why="nothing is there.",
            fix="give --resume the folder of a run that has saved a checkpoint.",
        )
    last = run / CHECKPOINTS / LAST
    if not written_by_lerobot(last):
        return
    if not (run / CONFIG_FILE).is_file():
        raise CraftError(
            f"Cannot resume {run}: lerobot-train made it, not craft.",
            why=f"it has no {CONFIG_FILE}.",
            fix=f"start a run of craft's from it with --policy {run}, or continue it with "
            "lerobot-train --resume=true.",
            exit_code=EXIT_USAGE,
        )
    if step is None:
        raise continued_by_lerobot(run, last)


def check_policy(policy: str) -> None:
    """Refuse a policy that can only be a folder and is not there."""
    if policy != DEMO:
        find_local_policy(policy)


def check_datasets(
    datasets: Sequence[NamedDataset], *, root: str | None, option: str = "--dataset"
) -> None:
    """Refuse datasets that can only be folders and are not there."""
    for entry in datasets:
        check_dataset(entry.name, root=root, option=option)


def check_dataset(name: str, *, root: str | None = None, option: str) -> None:
    """Refuse a dataset that can only be a folder and is not there."""
    if name not in (DEMO, *DEMO_DATASETS):
        find_local_dataset(name, root, option=option)


def check_instructions(source: str) -> None:
    """Refuse --old-tasks if it can only be a file or a folder and is not there."""
    looks_local = can_only_be_local(source) or "/" not in source or source.endswith(".txt")
    if looks_local and not Path(source).expanduser().exists():
        raise CraftError(
            f"Cannot read the old instructions from {source}.",
            why="there is no such file or folder.",
            fix="give --old-tasks a text file with one instruction a line, or a LeRobot dataset.",
            exit_code=EXIT_USAGE,
        )


def check_cache(cache: Location) -> None:
    """Refuse a local cache that is not there."""
    if isinstance(cache, Path) and not cache.exists():
        from craftcli.cache.reading.reader import CacheReader

        CacheReader.open(cache)


def check_environments(names: Sequence[str]) -> None:
    """Refuse environments that are unknown or not installed."""
    if names:
        from craftcli.evaluation.simulators.names import check_environment_name

        for name in names:
            check_environment_name(name)


def check_device(device: str) -> None:
    """Refuse a device that torch cannot know, or a GPU without a driver."""
    if device == "auto" or importlib.metadata.entry_points(group="torch.backends"):
        # A plug-in of torch may bring a device of its own.
        return
    kind = device.partition(":")[0]
    if kind not in _DEVICES or not re.fullmatch(r"\w+(:\d+)?", device):
        why = f"it is none of {', '.join(_DEVICES)}, with a number as in cuda:1."
    elif kind == "cuda" and not _has_gpu_driver():
        why = "this machine has no driver of an NVIDIA or AMD GPU."
    elif kind == "mps" and sys.platform != "darwin":
        why = "it is the GPU of a Mac."
    else:
        return
    raise CraftError(
        f"The device {device!r} cannot be used.",
        why=why,
        fix="use --device auto.",
        exit_code=EXIT_USAGE,
    )


def _has_gpu_driver() -> bool:
    """Whether torch could find a GPU; True where that is not known."""
    if sys.platform != "linux" or Path("/dev/kfd").exists():
        return True
    return has_library("libcuda.so.1")
