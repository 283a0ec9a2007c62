"""Opening a LeRobot checkpoint: policy, adapters, processors, and the check of its weights."""

import contextlib
import io
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from huggingface_hub import snapshot_download
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

# Registers the demo's policy type with LeRobot, so that its checkpoints open like any other.
from craftcli.demo import configuration_tiny_pi0_fast as _registered  # noqa: F401
from craftcli.errors import CraftError
from craftcli.policies.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_state,
    attach_adapters,
    base_of,
)
from craftcli.policies.base import Policy, PolicyAdapter
from craftcli.policies.generic import PathAdapter
from craftcli.policies.hub import HUB_ERRORS, reason
from craftcli.policies.paths import is_path
from craftcli.policies.registry import adapter_for, register_plugins
from craftcli.policies.remote_code import remote_code
from craftcli.policies.weights import check_weights

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened LeRobot checkpoint."""

    policy: Policy
    preprocess: Any
    """LeRobot's pipeline from a dataset batch to model inputs, with the checkpoint's statistics."""
    postprocess: Any
    adapter: PolicyAdapter
    folder: Path
    source: str
    """What the user wrote: a folder or a Hub name."""
    revision: str | None
    peft: Any = None
    """The policy as PEFT wraps it, when only adapters are trained; its layers are the policy's."""
    base: Path | None = None
    """Folder of the policy under the adapters, when `folder` holds nothing but those."""

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold the weights, when the policy is as it was opened."""
        if self.base is None:
            return (self.folder / WEIGHTS_FILE,)
        return self.base / WEIGHTS_FILE, self.folder / ADAPTER_WEIGHTS

    @property
    def trained(self) -> Policy:
        """What is saved: the policy, or its adapters."""
        return self.policy if self.peft is None else self.peft

    @property
    def policy_type(self) -> str:
        """LeRobot's name of the policy family."""
        name: str = self.policy.config.type
        return name

    @property
    def renames(self) -> dict[str, str]:
        """What the preprocessor renames, from the dataset's names to the policy's."""
        found: dict[str, str] = {}
        # A loop of the user's own may prepare batches with any function.
        for step in getattr(self.preprocess, "steps", ()):
            found |= getattr(step, "rename_map", {})
        return found

    def for_stack(self, stack: str | None) -> Self:
        """This checkpoint as it is run for a stack: by its family's name, or by a path."""
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
    """Open a checkpoint folder (or a run, or a Hub name) and check that every weight arrived.

    `renames`, from a dataset's names to the policy's, replace those saved with it.
    """
    register_plugins()
    folder = resolve_checkpoint(source, revision=revision)
    base = _base_folder(folder)
    config = _load_config(folder, source)
    config.device = device
    config.pretrained_path = str(folder)
    adapter = adapter_for(config.type)
    overrides = {"device_processor": {"device": device}, **adapter.processor_overrides(config)}
    if renames:
        overrides["rename_observations_processor"] = {"rename_map": dict(renames)}
    try:
        # LeRobot prints while loading; standard output belongs to the command's data.
        with (
            contextlib.redirect_stdout(io.StringIO()),
            remote_code(source, allowed=trust_remote_code),
        ):
            policy = get_policy_class(config.type).from_pretrained(
                str(base or folder), config=config
            )
            preprocess, postprocess = make_pre_post_processors(
                config, pretrained_path=str(folder), preprocessor_overrides=overrides
            )
    except Exception as error:  # whatever LeRobot, transformers and the Hub raise for one fact
        raise _incomplete(source, error) from error
    if not adapter.loads_strictly:
        check_weights(policy.state_dict(), (base or folder) / WEIGHTS_FILE, adapter)
    policy.to(device)
    peft = _attached(policy, folder, adapter, source) if base else None
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
    """The folder that holds config.json and the weights: given, inside a run, or from the Hub."""
    given = Path(source).expanduser()
    for folder in (given, given / "pretrained_model", given / "checkpoints/last/pretrained_model"):
        if (folder / "config.json").is_file():
            return folder.resolve()
    if given.exists() or source.startswith((".", "/", "~")):
        raise CraftError(
            f"No policy at {source}.",
            why="it holds no config.json, nor does its checkpoints/last/pretrained_model.",
            fix="give --policy a LeRobot checkpoint folder, a run, or a Hub name.",
        )
    try:
        return Path(snapshot_download(source, revision=revision))
    except HUB_ERRORS as error:
        raise CraftError(
            f"Cannot open the policy {source!r}.",
            why=reason(error),
            fix="check the name, or give the folder of a downloaded checkpoint.",
        ) from error


def _base_folder(folder: Path) -> Path | None:
    """Where the policy under a checkpoint's adapters is; None when it has none."""
    base = base_of(folder)
    if base is None:
        return None
    try:
        return resolve_checkpoint(base.source, revision=base.revision)
    except CraftError as error:
        raise CraftError(
            f"The policy under the adapters of {folder} cannot be opened.",
            why=f"it is {base.source}: {error.why}",
            fix="put it back there, or write its new place as base_model_name_or_path into "
            f"{folder / ADAPTER_CONFIG}.",
        ) from error


def _attached(policy: Policy, folder: Path, adapter: PolicyAdapter, source: str) -> Any:
    """The policy with a checkpoint's adapters, all of which arrived."""
    try:
        peft = attach_adapters(policy, folder)
    except Exception as error:  # PEFT raises many kinds for one fact: they do not fit
        raise _incomplete(source, error) from error
    check_weights(adapter_state(peft), folder / ADAPTER_WEIGHTS, adapter)
    return peft


def _incomplete(source: str, error: Exception) -> CraftError:
    cause: BaseException = error
    while cause.__cause__ is not None:  # LeRobot wraps the telling error in vague ones
        cause = cause.__cause__
    if isinstance(cause, CraftError):
        return cause
    lines = str(cause).strip().splitlines()
    return CraftError(
        f"The policy {source} cannot be opened.",
        why=f"{type(cause).__name__}: {lines[0] if lines else 'no message'}",
        fix="check that the folder holds the weights, configuration and processors that LeRobot "
        "saved, and that tokenizers it names are on disk or on the Hub with your access "
        "(hf auth login).",
    )


def _load_config(folder: Path, source: str) -> Any:
    try:
        # LeRobot leaves a copy of the configuration in the folder for temporary files.
        with tempfile.TemporaryDirectory() as scratch, patch.object(tempfile, "tempdir", scratch):
            return PreTrainedConfig.from_pretrained(str(folder))
    except Exception as error:  # draccus raises many kinds for one fact: it cannot be parsed
        raise CraftError(
            f"Cannot read the policy configuration of {source}.",
            why=f"{folder / 'config.json'}: {error}",
            fix="check that the checkpoint was saved by LeRobot 0.6.",
        ) from error
