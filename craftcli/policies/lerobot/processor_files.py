"""Opens the processors of a policy folder, with the tokenizers that were saved beside them.

LeRobot 0.6.0 and 0.6.1 save the name of a tokenizer. Later versions save the tokenizer too, in a
folder beside the processor's file; the file then lists it under `artifacts` and gives only its name
there, which 0.6.0 and 0.6.1 take for a name on the Hub. Here all versions find it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lerobot.policies.factory import make_pre_post_processors
from lerobot.utils.constants import (
    POLICY_POSTPROCESSOR_DEFAULT_NAME,
    POLICY_PREPROCESSOR_DEFAULT_NAME,
)
from transformers import PreTrainedTokenizerBase

from craftcli.errors import CraftError
from craftcli.policies.base import PolicyAdapter
from craftcli.policies.lerobot.remote_code import load_lazy_tokenizers

ARTIFACTS = "artifacts"
"""Where a step of a processor file lists what was saved beside it, by the step's setting."""

type Overrides = dict[str, dict[str, Any]]


def open_processors(
    folder: Path, config: Any, adapter: PolicyAdapter, *, renames: Mapping[str, str] | None = None
) -> tuple[Any, Any]:
    """LeRobot's two pipelines of a folder whose files `check_policy_files` has passed.

    Tokenizers of the folder win over those that the policy's configuration names.
    """
    before = _joined(
        {"device_processor": {"device": config.device}},
        adapter.processor_overrides(config),
        {"rename_observations_processor": {"rename_map": dict(renames)}} if renames else {},
        _saved_beside(folder, POLICY_PREPROCESSOR_DEFAULT_NAME),
    )
    pair: tuple[Any, Any] = make_pre_post_processors(
        config,
        pretrained_path=str(folder),
        preprocessor_overrides=before,
        postprocessor_overrides=_saved_beside(folder, POLICY_POSTPROCESSOR_DEFAULT_NAME),
    )
    load_lazy_tokenizers(*pair)
    _check_action_tokenizers(folder, *pair)
    return pair


def _check_action_tokenizers(folder: Path, *pipelines: Any) -> None:
    """Refuse a tokenizer of words where a policy needs one of actions: it fails at the first batch.

    transformers opens the words' tokenizer for any folder that has no processor of its own.
    """
    for pipeline in pipelines:
        for step in pipeline.steps:
            if isinstance(getattr(step, "action_tokenizer", None), PreTrainedTokenizerBase):
                name = step.action_tokenizer_name or "the one saved with it"
                raise CraftError(
                    f"The policy in {folder} cannot turn actions into tokens.",
                    why=f"its action tokenizer, {name}, is one of words.",
                    fix="name a FAST tokenizer (action_tokenizer_name in the policy's config.json, "
                    "for example lerobot/fast-action-tokenizer), with --trust-remote-code if it "
                    "brings Python code.",
                )


def _joined(*parts: Overrides) -> Overrides:
    joined: Overrides = {}
    for part in parts:
        for step, settings in part.items():
            joined[step] = {**joined.get(step, {}), **settings}
    return joined


def _saved_beside(folder: Path, name: str) -> Overrides:
    """The settings of steps whose value was saved beside a processor file."""
    file = folder / f"{name}.json"
    if not file.is_file():
        return {}  # LeRobot names the file that it misses, or makes the processors itself
    found: Overrides = {}
    for entry in json.loads(file.read_text("utf-8")).get("steps", ()):
        for setting, beside in (entry.get(ARTIFACTS) or {}).items():
            path = folder / beside
            if not path.exists():
                raise CraftError(
                    f"The policy in {folder} is not complete.",
                    why=f"{file.name} names {beside}, which is not there.",
                    fix="copy or download the whole folder again, with its subfolders.",
                )
            step = entry.get("registry_name") or entry["class"].rpartition(".")[2]
            found.setdefault(step, {})[setting] = str(path)
    return found
