"""The processors of a new task: the teacher's pipelines with the statistics that were chosen.

A run keeps both: its checkpoints hold the task's processors in `pretrained_model`, as LeRobot does,
and the teacher's in `teacher_processors` beside it, if their statistics differ. Anchors always go
through the teacher's.
"""

import contextlib
import copy
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.processor import NormalizerProcessorStep, UnnormalizerProcessorStep
from lerobot.utils.constants import ACTION, OBS_STATE

from craftcli.choices import OutputKind, Stats
from craftcli.errors import CraftError
from craftcli.policies.lerobot.apart_statistics import DATASET_PROCESSORS
from craftcli.policies.lerobot.checkpoint import Checkpoint, Processors
from craftcli.policies.lerobot.identity import same_processors
from craftcli.policies.lerobot.policy_files import check_policy_files
from craftcli.policies.lerobot.processor_files import open_processors
from craftcli.policies.lerobot.remote_code import remote_code
from craftcli.policies.lerobot.several_datasets import SeveralDatasets, labels, parts_of
from craftcli.policies.lerobot.statistics import (
    OUT_OF_SCALE,
    USED,
    Feature,
    FeatureChoice,
    Origin,
    Statistics,
    choose,
    serves_both,
    spreads_away,
    useless,
)

TEACHER_PROCESSORS = "teacher_processors"
"""Folder beside `pretrained_model` in a checkpoint of a run."""

_COUNT = "count"
"""LeRobot counts frames, too; that is no statistic of the numbers."""

type Stored = dict[str, dict[str, tuple[float, ...]]]
"""Statistics as JSON values: the numbers of a feature in one list."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StatisticsChoice:
    """The statistics that were chosen for every feature that a policy normalises."""

    features: tuple[FeatureChoice, ...]
    unknown: tuple[str, ...] = ()
    """Names in the teacher's normaliser that are no feature of the policy."""
    together: tuple[str, ...] = ()
    """The datasets that share the statistics; empty for a single one."""
    apart: tuple[str, ...] = ()
    """The datasets that each have statistics of their own; those here are the first one's."""

    @property
    def changed(self) -> bool:
        """Whether any feature gets other statistics than the teacher's."""
        own = any(c.origin in (Origin.DATASET, Origin.WIDENED) for c in self.features)
        return own or bool(self.apart)

    @property
    def statistics(self) -> Statistics:
        """The chosen statistics."""
        return {c.feature.name: c.numbers for c in self.features if c.numbers is not None}

    def sentences(self) -> list[str]:
        """What was chosen for each feature, and why."""
        found = [choice.why for choice in self.features]
        if self.unknown and self.changed:
            shown = ", ".join(self.unknown[:3]) + (" ..." if len(self.unknown) > 3 else "")
            found.append(f"The teacher's normaliser knows {shown} instead.")
        if self.apart:
            found.append(
                f"{' and '.join(self.apart)} are normalised apart, each with its own; "
                f"pretrained_model gets those of {self.apart[0]}."
            )
        if self.together:
            found.append(
                f"{' and '.join(self.together)} share these statistics; where the dataset's are "
                "used, theirs are joined, each by its frames."
            )
        return found

    def remarks(self) -> list[str]:
        """What is worth a warning."""
        return [choice.remark for choice in self.features if choice.remark]

    def units(self, output: OutputKind | None) -> str:
        """The units of the task's loss, as a phrase."""
        if output is OutputKind.TOKENS:
            return "the loss is the cross-entropy of tokens"
        action = next((c for c in self.features if c.feature.name == ACTION), None)
        if action is None or action.numbers is None:
            return "the loss is in raw units of the action"
        whose = "the dataset's" if action.origin is Origin.DATASET else "the teacher's"
        is_mean = action.feature.mode is NormalizationMode.MEAN_STD
        return f"the loss is in {whose} {'deviations' if is_mean else 'half ranges'} of the action"


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """A policy with the processors for a dataset, and how their statistics were chosen."""

    policy: Checkpoint
    choice: StatisticsChoice

    @property
    def stored(self) -> Stored | None:
        """The statistics for a manifest; None if they are the teacher's own."""
        if not self.choice.changed:
            return None
        return {
            name: {key: _as_floats(values) for key, values in numbers.items()}
            for name, numbers in self.choice.statistics.items()
        }


def fit_to(policy: Checkpoint, dataset: Any, stats: Stats, *, is_task: bool = False) -> Fitted:
    """Give a policy the statistics for a dataset; its former processors become the teacher's.

    A policy whose own statistics fit is returned as it is. `dataset` may be None: then there is
    nothing to choose from. Several datasets share their joined statistics.

    Data of a new task (`is_task`) may lie out of the teacher's scale. Then --stats widen does what
    --stats dataset does, and each of several datasets gets its own statistics. Anchors may not:
    they show what the teacher would see.
    """
    meta = getattr(dataset, "meta", None)
    if meta is None or _normaliser(policy.preprocess) is None:
        return Fitted(policy=policy, choice=StatisticsChoice(features=()))
    because = "by --stats dataset"
    if is_task and stats is Stats.WIDEN and (misfit := _out_of_scale(policy, meta)):
        stats, because = Stats.DATASET, misfit
    parts = parts_of(dataset)
    if parts and is_task and stats is Stats.DATASET:
        return _fit_apart(policy, dataset, because)
    choice = choose_statistics(policy, meta, stats, because=because)
    if parts:
        choice = replace(choice, together=tuple(labels(parts)))
    _take_sizes(policy, meta)
    if not choice.changed:
        return Fitted(policy=policy, choice=choice)
    return Fitted(policy=_with_task_statistics(policy, choice.statistics), choice=choice)


def _fit_apart(policy: Checkpoint, several: SeveralDatasets, because: str) -> Fitted:
    """Give a policy a pair of processors for each of several datasets."""
    choices = [
        choose_statistics(policy, meta, Stats.DATASET, because=because)
        for meta in several.part_metas
    ]
    _take_sizes(policy, several.meta)
    names = tuple(labels(several.parts))
    if not any(own.changed for own in choices):
        # All of them are the teacher's.
        return Fitted(policy=policy, choice=replace(choices[0], together=names))
    choice = replace(choices[0], apart=names)
    fitted = _with_task_statistics(policy, choices[0].statistics)
    pairs = tuple(_processors(policy, own.statistics) for own in choices)
    return Fitted(policy=replace(fitted, apart=pairs), choice=choice)


def _out_of_scale(policy: Checkpoint, meta: Any) -> str | None:
    """Why a dataset needs statistics of its own; None if the teacher's will do."""
    own = own_statistics(policy)
    names = {new: old for old, new in policy.renames.items()}
    worst, where = 0.0, ""
    for feature in normalised_features(policy):
        theirs = names.get(feature.name, feature.name)
        if feature.name not in own or theirs not in meta.features:
            continue
        new = _dataset_numbers(feature, meta, theirs, needed=False)
        if new is not None and (found := spreads_away(feature, own[feature.name], new)) > worst:
            worst, where = found, feature.name
    if worst <= OUT_OF_SCALE:
        return None
    return (
        f"because {where} lies up to {worst:.0f} spreads from the teacher's; old tasks keep the "
        "teacher's"
    )


def choose_statistics(
    policy: Checkpoint, meta: Any, stats: Stats, *, because: str = "by --stats dataset"
) -> StatisticsChoice:
    """Choose the statistics for a dataset, feature by feature."""
    own = own_statistics(policy)
    names = {new: old for old, new in policy.renames.items()}
    choices = []
    for feature in normalised_features(policy):
        theirs = names.get(feature.name, feature.name)
        if theirs not in meta.features:
            # A camera that this dataset does not have.
            if feature.name in own:
                choices.append(_unneeded(feature, own))
            continue
        mine = own.get(feature.name)
        needed = stats is not Stats.TEACHER and bool(useless(feature, mine))
        needed |= stats is Stats.DATASET and not feature.is_image
        new = _dataset_numbers(feature, meta, theirs, needed=needed)
        choice = choose(stats, feature, mine, new or mine or {}, because=because)
        _require_size(choice, meta, theirs)
        choices.append(choice)
    known = {feature.name for feature in normalised_features(policy)}
    step = _normaliser(policy.preprocess)
    unknown = sorted(name for name in (step.stats or {}) if name not in known) if step else []
    return StatisticsChoice(features=tuple(choices), unknown=tuple(unknown))


@contextlib.contextmanager
def own_sizes(policy: Checkpoint) -> Iterator[None]:
    """Restore the sizes of a policy's features after it was fitted to other data for a while."""
    config = policy.policy.config
    before = config.input_features, config.output_features
    try:
        yield
    finally:
        config.input_features, config.output_features = before


def own_statistics(policy: Checkpoint) -> dict[str, dict[str, Any]]:
    """The statistics that a policy's normaliser applies, by the policy's names."""
    step = _normaliser(policy.preprocess)
    found: dict[str, dict[str, Any]] = {}
    for key, values in step.state_dict().items() if step else ():
        name, _, statistic = key.rpartition(".")
        # LeRobot normalises actions always, and observations only if they are listed.
        listed = name == ACTION or (step is not None and name in step.features)
        if listed and statistic != _COUNT:
            found.setdefault(name, {})[statistic] = values.numpy()
    return found


def normalised_features(policy: Checkpoint) -> list[Feature]:
    """The features that a policy normalises, by its configuration."""
    config = policy.policy.config
    found = []
    for name, feature in {**config.input_features, **config.output_features}.items():
        mode = config.normalization_mapping.get(feature.type.value, NormalizationMode.IDENTITY)
        if mode in USED:
            is_image = feature.type is FeatureType.VISUAL
            found.append(Feature(name=name, mode=mode, is_image=is_image))
    return found


def as_the_anchors(policy: Checkpoint, stored: Stored | None) -> Checkpoint:
    """A policy with the processors that the anchors of a cache went through.

    `stored` are the statistics of the cache's manifest, if they were not the teacher's own.
    """
    if stored is None:
        return policy.as_teacher()
    pair = _processors(policy, {name: _as_arrays(numbers) for name, numbers in stored.items()})
    return replace(
        policy, preprocess=pair.preprocess, postprocess=pair.postprocess, teachers=None, apart=()
    )


def with_anchors_of(policy: Checkpoint, stored: Stored | None) -> Checkpoint:
    """A student whose teacher's processors are those of a cache's anchors."""
    if stored is None:
        return policy
    anchors = as_the_anchors(policy, stored)
    if same_processors(anchors.preprocess, policy.preprocess):
        return replace(policy, teachers=None)
    pair = Processors(preprocess=anchors.preprocess, postprocess=anchors.postprocess)
    return replace(policy, teachers=pair)


def for_old_tasks(policy: Checkpoint) -> Checkpoint:
    """A policy as it acts in old tasks: with the teacher's processors, if one pair is not enough.

    Widened statistics serve the old tasks too.
    """
    if policy.teachers is None:
        return policy
    before, after = own_statistics(policy.as_teacher()), own_statistics(policy)
    one_serves = serves_both(normalised_features(policy), before, after)
    return policy if one_serves else policy.as_teacher()


def takes_size(policy: Checkpoint, stats: Stats | None, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a policy can read a vector that has another size than its configuration says.

    It can if it pads vectors and its normaliser has no statistics of another size; with --stats
    dataset, these are replaced.
    """
    limits = {ACTION: "max_action_dim", OBS_STATE: "max_state_dim"}
    limit = getattr(policy.policy.config, limits.get(name, ""), 0)
    if not policy.adapter.pads_vectors or len(shape) != 1 or shape[0] > limit:
        return False
    known = own_statistics(policy).get(name)
    feature = next((f for f in normalised_features(policy) if f.name == name), None)
    if known is None or feature is None or stats is Stats.DATASET or useless(feature, known):
        return True
    return bool(next(iter(known.values())).size == shape[0])


def save_teacher_processors(policy: Checkpoint, checkpoint: Path) -> None:
    """Write the teacher's processors beside the task's, and each dataset's, if a run has them."""
    kept = {} if policy.teachers is None else {TEACHER_PROCESSORS: policy.teachers}
    for number, own in enumerate(policy.apart, start=1):
        kept[f"{DATASET_PROCESSORS}/{number}"] = own
    for name, pair in kept.items():
        for pipeline in (pair.preprocess, pair.postprocess):
            pipeline.save_pretrained(checkpoint / name)


def with_saved_teacher(policy: Checkpoint, *, trust_remote_code: bool = False) -> Checkpoint:
    """A checkpoint of a run with the other processors that lie beside it, if any."""
    checkpoint = policy.folder.parent
    apart: list[Processors] = []
    while (own := checkpoint / DATASET_PROCESSORS / str(len(apart) + 1)).is_dir():
        apart.append(_load_pair(policy, own, trust_remote_code=trust_remote_code))
    found = replace(policy, apart=tuple(apart))
    folder = checkpoint / TEACHER_PROCESSORS
    if not folder.is_dir():
        return found
    return replace(found, teachers=_load_pair(policy, folder, trust_remote_code=trust_remote_code))


def _load_pair(policy: Checkpoint, folder: Path, *, trust_remote_code: bool) -> Processors:
    config = policy.policy.config
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            remote_code(policy.source, allowed=trust_remote_code),
        ):
            check_policy_files(folder, config)
            before, after = open_processors(folder, config, policy.adapter)
    except CraftError:
        raise
    except Exception as error:  # LeRobot raises many kinds for files that it cannot read
        raise CraftError(
            f"Cannot read the processors of {policy.source} in {folder.name}.",
            why=f"{folder}: {type(error).__name__}: {error}",
            fix="restore the folder from a copy of the run.",
        ) from error
    return Processors(preprocess=before, postprocess=after)


def _with_task_statistics(policy: Checkpoint, statistics: Statistics) -> Checkpoint:
    pair = _processors(policy, statistics)
    return replace(
        policy,
        preprocess=pair.preprocess,
        postprocess=pair.postprocess,
        teachers=Processors(preprocess=policy.preprocess, postprocess=policy.postprocess),
    )


def _processors(policy: Checkpoint, statistics: Statistics) -> Processors:
    """Copies of a policy's pipelines with other statistics, set as `lerobot-train` sets them."""
    # Together: a step of one pipeline may refer to a step of the other.
    before, after = copy.deepcopy((policy.preprocess, policy.postprocess))
    config = policy.policy.config
    inputs = {**config.input_features, **config.output_features}
    for pipeline, features in ((before, inputs), (after, config.output_features)):
        for step in pipeline.steps:
            if isinstance(step, NormalizerProcessorStep | UnnormalizerProcessorStep):
                step.features = _sized(features, statistics)
                step.norm_map = {
                    FeatureType(kind): mode for kind, mode in config.normalization_mapping.items()
                }
                step.stats = {name: dict(numbers) for name, numbers in statistics.items()}
                step.to()
    return Processors(preprocess=before, postprocess=after)


def _sized(
    features: Mapping[str, PolicyFeature], statistics: Statistics
) -> dict[str, PolicyFeature]:
    """The features with the sizes of their statistics, which may be of another robot."""
    found = dict(features)
    for name, numbers in statistics.items():
        if name in found and found[name].type is not FeatureType.VISUAL:
            size = np.size(next(iter(numbers.values())))
            found[name] = PolicyFeature(type=found[name].type, shape=(size,))
    return found


def _take_sizes(policy: Checkpoint, meta: Any) -> None:
    """Let the policy's features have the sizes of the dataset's, as LeRobot does for actions."""
    config = policy.policy.config
    names = {new: old for old, new in policy.renames.items()}

    def sized(name: str, feature: PolicyFeature) -> PolicyFeature:
        theirs = meta.features.get(names.get(name, name))
        if feature.type is FeatureType.VISUAL or theirs is None:
            return feature
        return PolicyFeature(type=feature.type, shape=tuple(theirs["shape"]))

    # New dictionaries, so that `own_sizes` can restore the old ones.
    for kind in ("input_features", "output_features"):
        features = getattr(config, kind)
        setattr(config, kind, {name: sized(name, feature) for name, feature in features.items()})


def take_sizes_of(policy: Checkpoint, other: Checkpoint) -> None:
    """Let a policy's features have the sizes of another's, which was made from it."""
    for kind in ("input_features", "output_features"):
        setattr(policy.policy.config, kind, dict(getattr(other.policy.config, kind)))


def _dataset_numbers(
    feature: Feature, meta: Any, name: str, *, needed: bool
) -> dict[str, Any] | None:
    """The dataset's statistics of a feature; None if they are not there and not needed."""
    found = (meta.stats or {}).get(name) or {}
    lacking = [key for key in USED[feature.mode] if key not in found]
    if not lacking:
        return {key: values for key, values in found.items() if key != _COUNT}
    if not needed:
        return None
    raise CraftError(
        f"The dataset {meta.repo_id!r} has no {' and '.join(lacking)} of {name}.",
        why=f"the policy normalises {feature.name} by {feature.mode.value.lower()}, and the "
        "teacher has no statistics of it.",
        fix="compute them with LeRobot: python -m lerobot.scripts.augment_dataset_quantile_stats "
        f"--repo-id={meta.repo_id}.",
    )


def _require_size(choice: FeatureChoice, meta: Any, name: str) -> None:
    if choice.numbers is None or choice.feature.is_image:
        return
    size = np.size(next(iter(choice.numbers.values())))
    shape = tuple(meta.features[name]["shape"])
    if shape != (size,) and len(shape) == 1:
        raise CraftError(
            f"The dataset {meta.repo_id!r} does not fit the policy's statistics.",
            why=f"{name} has {shape[0]} numbers, and the teacher's statistics are of {size}.",
            fix="use data of the same robot, or --stats dataset to normalise it with its own.",
        )


def _unneeded(feature: Feature, own: Statistics) -> FeatureChoice:
    return FeatureChoice(
        feature=feature,
        origin=Origin.TEACHER,
        numbers=own[feature.name],
        why=f"{feature.name}: the teacher's; the dataset has no such feature.",
    )


def _normaliser(pipeline: Any) -> NormalizerProcessorStep | None:
    # In a training loop of the user's own, it may be any function.
    steps = getattr(pipeline, "steps", ())
    return next((step for step in steps if isinstance(step, NormalizerProcessorStep)), None)


def _as_floats(values: Any) -> tuple[float, ...]:
    # Rounded as the normaliser holds them, so that a reader gets the same.
    return tuple(float(value) for value in np.float32(values).reshape(-1))


def _as_arrays(numbers: Mapping[str, tuple[float, ...]]) -> dict[str, Any]:
    return {name: np.array(values, dtype=np.float32) for name, values in numbers.items()}
