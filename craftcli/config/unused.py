"""Finds settings that the user chose and that have no effect beside the others."""

from collections.abc import Collection

from craftcli.choices import Controller, Kind, Merge, Mode, OutputKind, SurgeryScope
from craftcli.config.retention import RetentionConfig
from craftcli.config.settings import option_name

_PROJECTING = (Merge.WEIGHTED, Merge.EQUAL, Merge.TASK_PRIORITY)
# Plain fine-tuning uses these two of RetentionConfig as well.
_WITHOUT_RETENTION = ("mode", "grad_accum")
# Settings of TrainConfig that need anchors.
_OF_ANCHORS = (
    "anchor_batch_size",
    "cache",
    "anchor_root",
    "other_student",
    "anchors",
    "teacher",
    "old_tasks",
    "old_dataset",
    "old_dataset_root",
    "old_env",
    "old_env_episodes",
    "anchor_samples",
)
_OF_LAMBDA = ("lambda_init", "lambda_lr", "lambda_max", "lambda_warmup", "controller")


def unused_in_training(
    config: RetentionConfig, given: Collection[str], *, output: OutputKind | None = None
) -> list[str]:
    """Describe the settings in `given` that do not affect training, and what they would need.

    `output` is what the policy predicts, if that is known. For a policy that predicts tokens,
    --mode action has its own distance, and --loss does not apply.
    """
    if not config.retains:
        own = [n for n in RetentionConfig.names() if n not in _WITHOUT_RETENTION]
        names = list(dict.fromkeys([*own, *_OF_ANCHORS]))
        return _describe({"a --mode that retains": names}, given)
    needs: dict[str, list[str]] = {}
    if not config.uses_anchors:
        needs["a --mode with anchors"] = list(_OF_ANCHORS)
    if not config.compares_anchors:
        needs["a --mode that compares anchors"] = ["held_out_share"]
    if len(config.modes) == 1:
        needs["several modes"] = ["constraints"]
    if config.merge is Merge.EQUAL:
        needs["a --merge that weighs"] = list(_OF_LAMBDA)
    if config.controller is not Controller.NUPI:
        needs["--controller nupi"] = ["lambda_kp", "lambda_nu"]
    if config.surgery is SurgeryScope.NONE:
        needs["--surgery"] = ["conflict_threshold", "project_when"]
    elif config.merge not in _PROJECTING:
        needs["a --merge that projects"] = ["conflict_threshold", "project_when"]
    if Mode.EWC not in config.modes:
        needs["--mode ewc"] = ["fisher_samples"]
    compares_vectors = Mode.ACTION in config.modes and output is not OutputKind.TOKENS
    if Mode.HIDDEN not in config.modes and not compares_vectors:
        needs["--mode hidden"] = ["loss"]
    return _describe(needs, given)


def unused_in_building(
    kinds: Collection[Kind], given: Collection[str], *, output: OutputKind | None
) -> list[str]:
    """Describe the settings in `given` that do not affect the cache, and what they would need."""
    if Kind.ACTION not in kinds:
        return _describe({"--kind action": ["top_k"]}, given)
    if output is not OutputKind.TOKENS:
        return _describe({"a policy that predicts tokens": ["top_k"]}, given)
    return []


def _describe(needs: dict[str, list[str]], given: Collection[str]) -> list[str]:
    found = {need: [n for n in names if n in given] for need, names in needs.items()}
    return [
        f"{', '.join(map(option_name, names))} (without {need})"
        for need, names in found.items()
        if names
    ]
