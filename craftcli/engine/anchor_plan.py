"""What a run can make anchors of when it is given no cache, and what it chooses.

A teacher answers for any input, so anchors need no old labels, and often no old data. What there is
decides, in this order:

1. frames of the old data (--old-dataset), varied if they are few;
2. frames that the policy sees when it acts in an environment (--old-env);
3. the statistics of the policy's normaliser, for policies that read no images;
4. frames of the new data under the old instructions, for policies that read instructions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from craftcli.cache.build.anchor_selection import most_samples
from craftcli.cache.build.prompts import Prompts
from craftcli.cache.build.recipe import default_kinds
from craftcli.choices import AnchorSource, Kind, Mode, Stats
from craftcli.config.cache import CacheConfig
from craftcli.config.parsing import JOINED
from craftcli.config.policy_and_data import PolicyAndData
from craftcli.config.train import TrainConfig
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.input_statistics import InputStatistics, input_statistics
from craftcli.policies.lerobot.instructions import instructions_of, reads_instructions
from craftcli.sources import old_instructions, open_anchor_data, open_old_data

FRAMES = 512
"""Frames of a dataset that become anchors; with fewer, they are varied."""
VARIED_ROWS = 1024
"""Anchors made of few frames: 16 frames and 1008 variations held as much as 512 frames."""
DRAWN_STATES = 4096
"""Anchors drawn from statistics."""
SEED = 0
"""Not the run's own, so that runs with other seeds share the anchors."""

_EXPECTATION = {
    AnchorSource.OLD_FRAMES: (
        "512 old frames kept 0.94 and 1.00 of the old tasks in two Meta-World experiments, where "
        "the teacher had 0.92 and 1.00 (ACT on states, three seeds)."
    ),
    AnchorSource.STATISTICS: (
        "Without any old frame this kept 0.91 and 1.00 of the old tasks in two Meta-World "
        "experiments, where the teacher had 0.92 and 1.00 and plain fine-tuning 0.00 and 0.12 (ACT "
        "on states, three seeds). It holds states within the range of the old data only."
    ),
    AnchorSource.OLD_INSTRUCTIONS: (
        "In the demo this kept 1.00 of three old instructions, plain fine-tuning 0.03 (three "
        "seeds). Old scenes that look unlike the new data, and instructions that are not listed, "
        "are not held."
    ),
    AnchorSource.ENVIRONMENT: (
        "They hold what the policy does in these environments now, success or not. What they do "
        "not ask for is not held."
    ),
}
_EXPECTATION_VARIED = (
    "16 old frames with variations kept 0.90 and 1.00 of the old tasks in two Meta-World "
    "experiments, where the teacher had 0.92 and 1.00 (ACT on states, three seeds). A diffusion "
    "policy kept 0.91 of 0.96. In the demo, which sees images, variations did not help."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class AnchorPlan:
    """What anchors are made of, how many, and how well they can be expected to hold."""

    source: AnchorSource
    about: str
    """What the anchors are, as a phrase."""
    expectation: str
    """How well such anchors held, as far as it was measured."""
    config: CacheConfig
    dataset: Any
    """The dataset of the frames, or the one that shows how states move; None if episodes are
    recorded."""
    prompts: Prompts
    opposing: frozenset[str] = frozenset()
    """Instructions of the new task, which recorded frames must not have."""

    @property
    def varied(self) -> bool:
        """Whether there are variations of frames among them."""
        return self.config.augment > 0

    @property
    def normalised(self) -> Any:
        """The dataset whose frames are normalised; None if states are drawn."""
        return None if self.config.from_statistics else self.dataset

    def require_old(self, instructions: Iterable[str]) -> None:
        """Refuse frames that the policy saw under the instruction of the new task."""
        same = [line for line in instructions if _plain(line) in self.opposing]
        if same:
            raise CraftError(
                "--old-env must not ask for the new task.",
                why=f"{same[0]!r} is an instruction of the new data. What the policy does under "
                "it now opposes what it is to learn.",
                fix="name only environments of old tasks.",
                exit_code=EXIT_USAGE,
            )

    def trial(self, samples: int) -> "AnchorPlan":
        """The same anchors, but of at most so many frames."""
        config = replace(
            self.config,
            samples=min(samples, self.config.samples),
            augment=min(1, self.config.augment),
        )
        return replace(self, config=config)


def plan_anchors(config: TrainConfig, policy: Checkpoint, new_data: Any) -> AnchorPlan:
    """Choose what to make anchors of.

    Raises:
        CraftError: nothing there is can be used; the error lists the ways out.
    """
    _require_adapter(policy)
    old_data = open_old_data(config, policy)
    if old_data is None and config.old_env is None and config.is_demo and _labelled(config):
        # The demo has old data with labels, for the modes that need them.
        old_data = open_anchor_data(config, policy)
    if old_data is not None:
        return _of_old_frames(config, policy, old_data)
    _require_no_labels(config)
    if config.old_env is not None:
        return _of_environment(config, policy, new_data)
    statistics = input_statistics(policy)
    instructions = _usable_instructions(config, policy, new_data)
    speaks = reads_instructions(policy)
    drawable = _describes_inputs(statistics) and (instructions or not speaks)
    if drawable:
        return _of_statistics(config, policy, new_data, instructions)
    if instructions:
        return _of_old_instructions(config, policy, new_data, instructions)
    raise _nothing_to_make_of(statistics, speaks=speaks)


def _of_old_frames(config: TrainConfig, policy: Checkpoint, data: Any) -> AnchorPlan:
    # Labels belong to real frames, so that replay and EWC have no use for variations.
    may_vary = not _labelled(config)
    most = most_samples(data)
    # Variations of a policy that draws noise have one draw each, and need as many more.
    varied = VARIED_ROWS * policy.adapter.draws_per_frame
    wanted = config.anchor_samples or (FRAMES if most >= FRAMES else varied)
    frames = min(most, wanted)
    augment = max(round(wanted / frames) - 1, 0) if may_vary else 0
    about = f"{frames} frames of the old data {data.repo_id}"
    draws = 1
    if augment:
        about += f" and {frames * augment} variations of them"
    elif may_vary and config.anchor_samples is None:
        draws = policy.adapter.draws_per_frame
    if draws > 1:
        about += f", each with {draws} draws of noise"
    return AnchorPlan(
        source=AnchorSource.OLD_FRAMES,
        about=about,
        expectation=_EXPECTATION_VARIED if augment else _EXPECTATION[AnchorSource.OLD_FRAMES],
        config=_cache_config(config, policy, samples=frames, augment=augment, draws=draws),
        dataset=data,
        prompts=Prompts(seed=SEED),
    )


def _of_environment(config: TrainConfig, policy: Checkpoint, new_data: Any) -> AnchorPlan:
    episodes = {} if config.old_env_episodes is None else {"env_episodes": config.old_env_episodes}
    rows = config.anchor_samples or FRAMES
    settings = _cache_config(config, policy, samples=rows, env=config.old_env, **episodes)
    speaks = reads_instructions(policy)
    several = "episodes" if settings.env_episodes > 1 else "episode"
    names = ("each of " if len(settings.environments) > 1 else "") + ", ".join(
        settings.environments
    )
    return AnchorPlan(
        source=AnchorSource.ENVIRONMENT,
        about=f"up to {rows} frames that the policy sees when it acts itself, in "
        f"{settings.env_episodes} {several} of {names}; no old data is needed",
        expectation=_EXPECTATION[AnchorSource.ENVIRONMENT],
        config=settings,
        dataset=None,
        prompts=Prompts(seed=SEED),
        opposing=frozenset(map(_plain, instructions_of(new_data))) if speaks else frozenset(),
    )


def _of_statistics(
    config: TrainConfig, policy: Checkpoint, new_data: Any, instructions: tuple[str, ...]
) -> AnchorPlan:
    rows = config.anchor_samples or DRAWN_STATES
    return AnchorPlan(
        source=AnchorSource.STATISTICS,
        about=f"{rows} states drawn from the statistics of the policy's normaliser; no old data is "
        "needed",
        expectation=policy.adapter.statistics_expectation or _EXPECTATION[AnchorSource.STATISTICS],
        config=_cache_config(config, policy, samples=rows, from_statistics=True),
        dataset=new_data,
        prompts=Prompts(lines=instructions, seed=SEED) if instructions else Prompts(seed=SEED),
    )


def _of_old_instructions(
    config: TrainConfig, policy: Checkpoint, new_data: Any, instructions: tuple[str, ...]
) -> AnchorPlan:
    rows = min(config.anchor_samples or FRAMES, len(new_data))
    several = "instruction" if len(instructions) == 1 else "instructions"
    return AnchorPlan(
        source=AnchorSource.OLD_INSTRUCTIONS,
        about=f"{rows} frames of the new data under {len(instructions)} old {several}; no old data "
        "is needed",
        expectation=_EXPECTATION[AnchorSource.OLD_INSTRUCTIONS],
        config=_cache_config(config, policy, samples=rows),
        dataset=new_data,
        prompts=Prompts(lines=instructions, seed=SEED),
    )


def _cache_config(config: TrainConfig, policy: Checkpoint, **more: Any) -> CacheConfig:
    shared = {field.name: getattr(config, field.name) for field in fields(PolicyAndData)}
    # The usual kinds as well as those of the modes, so that runs in other modes share the cache.
    usual = default_kinds(policy.adapter)
    kinds = [kind for kind in Kind if kind in usual or kind.value in config.modes]
    if config.stats is Stats.DATASET:
        # The task's data has other statistics; the teacher knows its own.
        shared["stats"] = Stats.WIDEN
    return CacheConfig(**{**shared, "seed": SEED, "kind": JOINED.join(kinds), **more})


def _usable_instructions(config: TrainConfig, policy: Checkpoint, new_data: Any) -> tuple[str, ...]:
    """The old instructions, if the policy reads any; refuses those of the new task."""
    if not reads_instructions(policy):
        if config.old_tasks is not None:
            raise CraftError(
                "--old-tasks cannot be used with this policy.",
                why=f"policies of type {policy.policy_type} read no instructions.",
                fix="leave it out, or give old frames with --old-dataset.",
                exit_code=EXIT_USAGE,
            )
        return ()
    found = old_instructions(config)
    new = {_plain(task) for task in instructions_of(new_data)}
    same = [line for line in found if _plain(line) in new or "{task}" in line]
    if same:
        raise CraftError(
            "Old instructions must not be those of the new task.",
            why=f"{same[0]!r} is one of the new data. Frames of the new data under their own "
            "instruction hold the policy to what it did there before, which opposes the task: "
            "neither the old nor the new skill was left when that was tried.",
            fix="list only the other instructions in a text file, and give that to --old-tasks.",
            exit_code=EXIT_USAGE,
        )
    return found


def _plain(instruction: str) -> str:
    return " ".join(instruction.casefold().split()).rstrip(".")


def _describes_inputs(statistics: InputStatistics) -> bool:
    return bool(statistics.vectors) and not statistics.cameras and not statistics.missing


def _labelled(config: TrainConfig) -> list[str]:
    return [mode.value for mode in (Mode.REPLAY, Mode.EWC) if mode in config.modes]


def _require_no_labels(config: TrainConfig) -> None:
    labelled = _labelled(config)
    if labelled:
        raise CraftError(
            f"--mode {config.mode} needs old data.",
            why=f"{' and '.join(labelled)} learns from the labels of old frames, and anchors that "
            "are made have none.",
            fix="give old frames with --old-dataset, or hold the teacher's outputs instead with "
            "--mode hidden+action.",
            exit_code=EXIT_USAGE,
        )


def _require_adapter(policy: Checkpoint) -> None:
    if policy.adapter.output_kind is None:
        raise CraftError(
            "Anchors for this policy cannot be made without further settings.",
            why=f"craft has no adapter for {policy.policy_type}, so that it does not know which "
            "layers to hold.",
            fix="name them: craft cache build --kind hidden --stack PATH, then craft train --mode "
            "hidden --cache anchors.zarr; or train without retention with --mode none.",
            exit_code=EXIT_USAGE,
        )


def _nothing_to_make_of(statistics: InputStatistics, *, speaks: bool) -> CraftError:
    """The error when anchors cannot be made: what is missing, and the ways out."""
    if statistics.cameras and not speaks:
        missing = "it reads images and no instructions. Only old frames show what it used to see"
    elif statistics.missing and not speaks:
        missing = f"its normaliser has no statistics of {', '.join(statistics.missing)}"
    else:
        missing = "it reads instructions, and its old ones are not known"
    ways = ["the old instructions with --old-tasks (a file or a dataset)"] if speaks else []
    ways += [
        "old frames, even a few, with --old-dataset",
        "an environment in which it can act with --old-env",
        "no retention with --mode none",
    ]
    return CraftError(
        "There is no cache, and nothing to make anchors of for this policy.",
        why=f"{missing}.",
        fix=f"give {'; or '.join(ways)}.",
        exit_code=EXIT_USAGE,
    )
