"""Settings of `craft cache build`."""

from dataclasses import dataclass
from pathlib import Path
from typing import override

from craftcli.choices import ActionSource, Images, Kind, Layout, Pooling, Sampling, StoreDtype
from craftcli.config.parsing import joined_problems, parse_fixed, split_joined, split_list
from craftcli.config.policy_and_data import PolicyAndData
from craftcli.config.settings import Effect, option_name, setting
from craftcli.locations import RemotePath

_ANCHORS = "Anchors"
_STORED = "Stored values"
_SAMPLING = Sampling.PER_PHASE
"""Sixteen frames drawn at random can miss a whole phase of a task, and with it the skill: measured,
examples/metaworld_forgetting/README.md."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig(PolicyAndData):
    """Settings of `craft cache build`."""

    output: Path | RemotePath = setting(
        Path("anchors.zarr"),
        "Where to write the cache: a folder, or a URL s3://, gs:// or hf://.",
        aliases=("-o", "--output_dir"),
        effect=Effect.PLACE,
    )
    overwrite: bool = setting(
        False,
        "Replace an existing cache, once the new one is complete.",
        effect=Effect.PLACE,
    )
    resume: bool = setting(False, "Continue a build that was interrupted.", effect=Effect.COMPUTING)
    samples: int = setting(
        512,
        "Number of anchors to store. More anchors hold more of the old behaviour.",
        low=1,
        panel=_ANCHORS,
    )
    sampling: Sampling = setting(
        _SAMPLING,
        "Draw frames evenly over the phases of an episode, over episodes or tasks, or uniformly.",
        panel=_ANCHORS,
    )
    episodes: str | None = setting(
        None,
        "Draw from these episodes only, as in 0-9,12.",
        aliases=("--dataset.episodes",),
        metavar="LIST",
        panel=_ANCHORS,
    )
    indices: str | None = setting(
        None,
        "Store exactly these frames: a list as in 0-9,12, or a file with one index per line.",
        metavar="LIST",
        panel=_ANCHORS,
    )
    exclude: Path | RemotePath | None = setting(
        None,
        "Leave out the frames of this other cache of the same dataset. This makes held-out "
        "anchors for craft eval.",
        panel=_ANCHORS,
    )
    prompts: Path | None = setting(
        None,
        "File with instructions, one per line, to vary the instructions of the rows; "
        "{task} stands for the row's own.",
        metavar="FILE",
        panel=_ANCHORS,
    )
    augment: int = setting(
        0,
        "Make N more anchors of every frame: mixtures of two frames with noise, and the teacher's "
        "own answers to them. 16 frames with 63 each hold about as much as 512 frames.",
        low=0,
        panel=_ANCHORS,
    )
    augment_noise: float = setting(
        0.3,
        "Noise of --augment, in deviations of the teacher's normaliser.",
        low=0,
        panel=_ANCHORS,
    )
    augment_fixed: str | None = setting(
        None,
        "Numbers that --augment leaves as they are, such as angles and one-hot numbers: a vector "
        "such as observation.state, or some of its numbers, as in observation.state:0,3-5; several "
        "with commas.",
        metavar="NAMES",
        panel=_ANCHORS,
    )
    draws: int = setting(
        1,
        "Store every frame N times, each with its own noise and time, for policies that draw them.",
        low=1,
        panel=_ANCHORS,
    )
    from_statistics: bool = setting(
        False,
        "Draw the states of the anchors from the statistics of the policy's normaliser. Needs no "
        "old data; works for policies that read no images.",
        panel=_ANCHORS,
    )
    statistics_file: Path | None = setting(
        None,
        "With --from-statistics: take the smallest and largest values from this file, the "
        "meta/stats.json of a dataset, instead of the policy's normaliser. One task of several.",
        metavar="FILE",
        panel=_ANCHORS,
    )
    moves_like: str | None = setting(
        None,
        "With --from-statistics: a dataset of the same robot, such as that of the new task. It "
        "shows which numbers of a state repeat others and how fast they move; none of its frames "
        "becomes an anchor.",
        metavar="DATASET",
        panel=_ANCHORS,
    )
    env: str | None = setting(
        None,
        "Take the anchors from episodes in which the policy itself acts: an environment of craft "
        "eval such as metaworld:reach-v3, several with commas. Needs no old data.",
        metavar="ENV",
        panel=_ANCHORS,
    )
    env_episodes: int = setting(
        20,
        "Episodes to record in each environment of --env; --samples frames are drawn from them.",
        low=1,
        panel=_ANCHORS,
    )
    images: Images = setting(
        Images.REFERENCE,
        "Read images from the dataset when they are needed, or embed them in the cache.",
        panel=_STORED,
    )
    kind: str | None = setting(
        None,
        "What to store, for the train modes of the same names: hidden, action, token_ce, or "
        "several as in hidden+token_ce. Default: hidden+action, or hidden for a policy family "
        "without an adapter.",
        metavar="KIND",
        panel=_STORED,
    )
    actions: ActionSource = setting(
        ActionSource.TEACHER,
        "For policies with actions as input: show the teacher its own actions or the dataset's.",
        panel=_ANCHORS,
    )
    top_k: int = setting(
        32,
        "Number of values that --kind action stores for each token: the most likely ones.",
        low=1,
        panel=_STORED,
    )
    layers: str | None = setting(
        None,
        "Layers to store, by index; -1 is the last, as in -2,-1. Default: the policy family's.",
        metavar="LIST",
        panel=_STORED,
    )
    stack: str | None = setting(
        None,
        "Stack of layers: a name such as vlm, or the path of a list of layers in the policy, "
        "such as model.encoder.layers. Default: the policy family's.",
        metavar="STACK",
        panel=_STORED,
    )
    layout: Layout | None = setting(
        None,
        "Order of the axes of the hidden states, for a --stack that is a path: b the batch, "
        "s the tokens, d the features. Default: found from their shape.",
        panel=_STORED,
    )
    pooling: Pooling | None = setting(
        None,
        "Which tokens to store, and how to average them. Default: the policy family's.",
        panel=_STORED,
    )
    dtype: StoreDtype = setting(
        StoreDtype.AUTO,
        "Precision of the stored hidden states; auto is the teacher's.",
        panel=_STORED,
    )
    batch_size: int = setting(
        32,
        "Samples that the teacher computes at once. Lower it when memory is short.",
        low=1,
        aliases=("--batch_size",),
    )
    chunk_mib: float = setting(
        16.0,
        "Size of a chunk in MiB. A chunk is read, checked and resumed as a whole.",
        above=0,
    )

    @override
    def problems(self) -> list[str]:
        found = super().problems()
        if self.kind is not None:
            found += joined_problems("--kind", self.kind, Kind)
        if not found and len(self.datasets) > 1:
            found += [
                f"{option_name(name)} belongs to a single --dataset; weights choose among several"
                for name in ("episodes", "indices")
                if getattr(self, name) is not None
            ]
        if self.exclude is not None and self.indices is not None:
            found.append("--exclude has no effect with --indices, which names every frame")
        if self.augment and self.draws > 1:
            found.append("--draws has no effect with --augment, which draws anew for every anchor")
        found += self._fixed_problems()
        if (self.augment or self.draws > 1) and self.actions is ActionSource.DATA:
            found.append("made anchors have no labels, so that --actions data cannot be used")
        if self.from_statistics:
            found += [
                f"{option_name(name)} has no effect with --from-statistics, which reads no data"
                for name in ("episodes", "indices", "exclude", "augment")
                if getattr(self, name)
            ]
        else:
            found += [
                f"{option_name(name)} needs --from-statistics"
                for name in ("statistics_file", "moves_like")
                if getattr(self, name) is not None
            ]
        found += self._environment_problems()
        if self.layout is not None and "." not in (self.stack or ""):
            found.append("--layout needs a --stack that is a path, such as model.encoder.layers")
        if Kind.TOKEN_CE in self.kinds and self.actions is ActionSource.DATA:
            found.append("--kind token_ce stores the teacher's own tokens, not those of the data")
        if not found and self.kinds and Kind.HIDDEN not in self.kinds:
            found += [
                f"{option_name(name)} needs --kind hidden"
                for name in ("layers", "stack", "layout", "pooling")
                if getattr(self, name) is not None
            ]
        return found

    def _environment_problems(self) -> list[str]:
        if self.env is None:
            return []
        if not self.environments:
            return ["--env names no environment"]
        others = ("from_statistics", "episodes", "indices", "exclude", "augment")
        found = [
            f"{option_name(name)} cannot be combined with --env"
            for name in others
            if getattr(self, name)
        ]
        if self.draws > 1:
            found.append("--draws cannot be combined with --env")
        if self.sampling is not _SAMPLING:
            found.append("--sampling cannot be combined with --env")
        if self.actions is ActionSource.DATA:
            found.append("recorded frames have no labels, so that --actions data cannot be used")
        return found

    @property
    @override
    def needs_dataset(self) -> bool:
        """Whether anchors are taken from a dataset."""
        return self.env is None and not self.from_statistics

    @property
    def environments(self) -> tuple[str, ...]:
        """The environments of --env, each once."""
        return split_list(self.env)

    @property
    def stored_images(self) -> Images:
        """Where images are: without a dataset to refer to, always in the cache."""
        return self.images if self.needs_dataset else Images.EMBED

    def _fixed_problems(self) -> list[str]:
        if self.augment_fixed is None:
            return []
        if not self.augment:
            return ["--augment-fixed needs --augment"]
        try:
            parse_fixed(self.augment_fixed)
        except ValueError as error:
            return [f"--augment-fixed {error}"]
        return []

    @property
    def fixed(self) -> dict[str, tuple[int, ...] | None]:
        """The numbers that --augment leaves as they are, by vector."""
        return parse_fixed(self.augment_fixed) if self.augment_fixed else {}

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What to store; empty when the policy family decides."""
        return () if self.kind is None else split_joined(self.kind, Kind)

    @property
    def rows(self) -> int:
        """How many rows --samples makes, without --indices."""
        return self.samples * (1 + (self.augment or self.draws - 1))
