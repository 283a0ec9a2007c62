"""Opening a LeRobot checkpoint: policy, processors, LoRA weights, and a check that all loaded."""

import contextlib
import io
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class

from craftcli.config.run_paths import find_beside

# Registers the demo's policy type with LeRobot, so that its checkpoints open like any other.
from craftcli.demo import configuration_tiny_pi0_fast as _registered  # noqa: F401
from craftcli.errors import CraftError
from craftcli.local_policies import find_local_policy
from craftcli.patching import replaced
from craftcli.policies.base import Policy, PolicyAdapter
from craftcli.policies.families.any_policy import PathAdapter
from craftcli.policies.families.registry import adapter_for, register_policy_plugins
from craftcli.policies.layer_paths import is_path
from craftcli.policies.lerobot.loading import check_filled, read_once
from craftcli.policies.lerobot.lora_files import (
    LORA_CONFIG,
    LORA_WEIGHTS,
    attach_lora,
    base_of,
    lora_state,
)
from craftcli.policies.lerobot.policy_files import check_policy_files
from craftcli.policies.lerobot.processor_files import open_processors
from craftcli.policies.lerobot.remote_code import remote_code
from craftcli.policies.lerobot.weight_files import (
    WEIGHTS_FILE,
    check_weights,
    note_averaged,
    refuse_shards,
)

_HUB_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)


@dataclass(frozen=True, kw_only=True, eq=False)
class Processors:
    """LeRobot's two pipelines of a policy."""

    preprocess: Any
    postprocess: Any


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened LeRobot checkpoint."""

    policy: Policy
    preprocess: Any
    """LeRobot's pipeline from a dataset batch to model inputs, with the checkpoint's statistics."""
    postprocess: Any
    """LeRobot's pipeline from predicted to real actions."""
    adapter: PolicyAdapter
    folder: Path
    source: str
    """The folder or Hub name as the user wrote it."""
    revision: str | None
    peft: Any = None
    """The policy inside PEFT's wrapper, if only LoRA weights are trained; it shares the layers."""
    base: Path | None = None
    """Folder of the policy under the LoRA weights, if `folder` holds only those."""
    teachers: Processors | None = None
    """The teacher's processors, if `preprocess` has other statistics, for a new task."""
    apart: tuple[Processors, ...] = ()
    """A pair for each dataset of a list, if their statistics are kept apart; `preprocess` is the
    first one's."""

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files from which the weights were loaded."""
        if self.base is None:
            return (self.folder / WEIGHTS_FILE,)
        return self.base / WEIGHTS_FILE, self.folder / LORA_WEIGHTS

    @property
    def trained(self) -> Policy:
        """The module that is saved: the policy, or PEFT's wrapper with the LoRA weights."""
        return self.policy if self.peft is None else self.peft

    @property
    def policy_type(self) -> str:
        """LeRobot's name of the policy family."""
        name: str = self.policy.config.type
        return name

    @property
    def renames(self) -> dict[str, str]:
        """The preprocessor's renames, from the dataset's names to the policy's."""
        found: dict[str, str] = {}
        # In a training loop of the user's own, `preprocess` may be any function.
        for step in getattr(self.preprocess, "steps", ()):
            found |= getattr(step, "rename_map", {})
        return found

    def as_teacher(self) -> Self:
        """This checkpoint with the teacher's processors, through which anchors go."""
        if self.teachers is None:
            return self
        pair = self.teachers
        return replace(
            self, preprocess=pair.preprocess, postprocess=pair.postprocess, teachers=None, apart=()
        )

    def with_processors_of(self, other: "Checkpoint") -> Self:
        """This checkpoint with the processors of another one."""
        return replace(self, preprocess=other.preprocess, postprocess=other.postprocess)

    def for_stack(self, stack: str | None) -> Self:
        """This checkpoint with the adapter for a stack: the family's, or one that reads a path."""
        if stack is None or not is_path(stack):
            return self
        return replace(self, adapter=PathAdapter(self.adapter))


def load_checkpoint(
    source: str,
    *,
    device: str,
    revision: str | None = None,
    renames: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Open a checkpoint folder, a run or a Hub name, and check that every weight was loaded.

    `renames`, from a dataset's names to the policy's, replace those saved with the checkpoint.
    """
    register_policy_plugins()
    folder = resolve_checkpoint(source, revision=revision)
    base = _base_folder(folder)
    config = _load_config(folder, source)
    config.device = device
    config.pretrained_path = str(folder)
    adapter = adapter_for(config.type)
    try:
        # LeRobot prints while loading; standard output belongs to the command's data.
        with (
            contextlib.redirect_stdout(io.StringIO()),
            remote_code(source, allowed=trust_remote_code),
            read_once() as unfilled,
        ):
            policy_class = get_policy_class(config.type)
            for checked in filter(None, (folder, base)):
                check_policy_files(checked, config)
            refuse_shards(base or folder)
            policy = policy_class.from_pretrained(str(base or folder), config=config)
            preprocess, postprocess = open_processors(folder, config, adapter, renames=renames)
    except Exception as error:  # LeRobot, transformers and the Hub raise many kinds here
        raise _cannot_open(source, error) from error
    weights = (base or folder) / WEIGHTS_FILE
    if not adapter.loads_strictly:
        check_weights(policy.state_dict(), weights, adapter)
    check_filled(policy, unfilled, weights)
    note_averaged(folder)
    policy.to(device)
    with remote_code(source, allowed=trust_remote_code):
        peft = _with_lora(policy, folder, base, adapter, source) if base else None
    return Checkpoint(
        policy=policy,
        preprocess=preprocess,
        postprocess=postprocess,
        adapter=adapter,
        folder=folder,
        source=source,
        revision=revision,
        peft=peft,
        base=base,
    )


def resolve_checkpoint(source: str, *, revision: str | None = None) -> Path:
    """The folder with config.json and the weights: `source`, inside a run, or from the Hub."""
    if (folder := find_local_policy(source)) is not None:
        return folder
    try:
        return Path(snapshot_download(source, revision=revision))
    except _HUB_ERRORS as error:
        # The Hub's errors are long; their first line says enough.
        lines = str(error).strip().splitlines()
        raise CraftError(
            f"Cannot open the policy {source!r}.",
            why="there is no such folder, and the download from the Hub failed: "
            f"{lines[0] if lines else repr(error)}",
            fix="check the name, or give the folder of a downloaded checkpoint.",
        ) from error


def _base_folder(folder: Path) -> Path | None:
    """The folder of the policy under a checkpoint's LoRA weights; None if it has none."""
    base = base_of(folder)
    if base is None:
        return None
    try:
        # It may have moved together with the run that the checkpoint belongs to.
        return resolve_checkpoint(find_beside(base.source, folder.parent), revision=base.revision)
    except CraftError as error:
        raise CraftError(
            f"Cannot open the policy under the LoRA weights of {folder}.",
            why=f"it is {base.source}: {error.why}",
            fix="put it back there, or write its new location as base_model_name_or_path into "
            f"{folder / LORA_CONFIG}.",
        ) from error


def _with_lora(
    policy: Policy, folder: Path, base: Path, adapter: PolicyAdapter, source: str
) -> Any:
    """The policy with a checkpoint's LoRA weights, after a check that all of them were loaded."""
    try:
        peft = attach_lora(policy, folder)
    except Exception as error:  # PEFT raises many kinds if the weights do not fit
        raise _cannot_open(source, error) from error
    check_weights(lora_state(peft), folder / LORA_WEIGHTS, adapter)
    own = peft.active_peft_config
    if Path(own.base_model_name_or_path).is_absolute():
        # It may have moved: the next checkpoint names the place where it was found.
        own.base_model_name_or_path = str(base)
    return peft


def _cannot_open(source: str, error: Exception) -> CraftError:
    cause: BaseException = error
    # LeRobot wraps the specific error in vague ones.
    while cause.__cause__ is not None and not isinstance(cause, CraftError):
        cause = cause.__cause__
    if isinstance(cause, CraftError):
        # A copy: the caller raises it `from` an error that has `cause` as its own cause.
        return CraftError(cause.what, why=cause.why, fix=cause.fix, exit_code=cause.exit_code)
    lines = str(cause).strip().splitlines()
    return CraftError(
        f"The policy {source} cannot be opened.",
        why=f"{type(cause).__name__}: {lines[0] if lines else 'no message'}",
        fix="check that the folder holds the weights, configuration and processors that LeRobot "
        "saved, and that the tokenizers it names are on disk or on the Hub with your access "
        "(hf auth login).",
    )


def _load_config(folder: Path, source: str) -> Any:
    try:
        # LeRobot writes a copy of the configuration to the temporary folder and never deletes it.
        with tempfile.TemporaryDirectory() as scratch, replaced(tempfile, "tempdir", scratch):
            return PreTrainedConfig.from_pretrained(str(folder))
    except Exception as error:  # draccus raises many kinds for a file that it cannot parse
        raise CraftError(
            f"Cannot read the policy configuration of {source}.",
            why=f"{folder / 'config.json'}: {error}",
            fix="check that it was saved by LeRobot 0.6 or later, and by none that is later than "
            f"the installed {version('lerobot')}: its settings may be new.",
        ) from error
