"""Opening what a policy is held to: a cache against a policy, and the terms of a run."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from craftcli.cache.format import Manifest
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.row_digests import FrameDigests
from craftcli.choices import Kind, LossKind, Mode
from craftcli.config.retention import DEFAULT_EPSILON
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.anchor_plan import AnchorPlan
from craftcli.engine.retention.anchor_dataset import AnchorDataset, open_anchor_dataset
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.engine.retention.imitation import Imitation
from craftcli.engine.retention.live_anchors import LIVE_FILE, LiveAnchors, LiveRecord
from craftcli.engine.retention.live_teacher import open_live_teacher
from craftcli.engine.retention.replay import Replay, trainable_weights
from craftcli.engine.retention.self_check import check_identity, check_known
from craftcli.engine.retention.terms import RetentionTerms, Term
from craftcli.engine.retention.weight_distance import WeightDistance
from craftcli.errors import CraftError
from craftcli.locations import Location
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.identity import teacher_identity
from craftcli.policies.lerobot.task_processors import as_the_anchors

type Planning = Callable[[Checkpoint], AnchorPlan]

_IMITATED = (Mode.HIDDEN, Mode.ACTION, Mode.TOKEN_CE)
_LABELLED = (Mode.REPLAY, Mode.EWC)

WEIGHTS_FILE = "retained_weights.safetensors"
"""In a run's folder: the weights that a resumed run is held to."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenedAnchors:
    """The anchors of a cache, opened for one policy."""

    policy: Checkpoint
    """The policy, with the adapter that reads the cache's stack."""
    anchors: AnchorSet
    dataset: AnchorDataset | None
    """The dataset of the anchors, if images or labels are read from it."""

    def imitation(
        self,
        modes: Collection[Mode],
        *,
        loss: LossKind = LossKind.NMSE,
        stride: int = 1,
        weighs_rows: bool = True,
    ) -> Imitation:
        """The comparison of the policy with the cache in these modes."""
        policy = self.policy
        return Imitation(
            tuple(modes),
            self.anchors,
            policy.policy,
            policy.adapter,
            loss=loss,
            stride=stride,
            weighs_rows=weighs_rows,
        )


def open_anchors(
    reader: CacheReader,
    policy: Checkpoint,
    *,
    kinds: Collection[Kind],
    batch_size: int = 1,
    seed: int = 0,
    anchor_root: str | None = None,
    dataset: AnchorDataset | None = None,
    labels: bool = False,
    same_teacher: bool = False,
    held_out_share: float = 0.0,
) -> OpenedAnchors:
    """Open a cache to compare a policy with it; every such comparison starts here.

    Args:
        reader: The cache.
        policy: The teacher of the cache or a student of it.
        kinds: What to read of the teacher's results.
        batch_size: Rows of a numbered batch.
        seed: Decides the order of numbered batches.
        anchor_root: Folder of the anchors' dataset, if it has moved.
        dataset: That dataset, if the caller has opened it already.
        labels: Whether the dataset is needed for its labels, even if the cache holds the images.
        same_teacher: Whether to refuse a policy that is not the teacher itself.
        held_out_share: The share of rows that no numbered batch has.
    """
    manifest, name = reader.manifest, str(reader.path)
    check_known(manifest, cache=name)
    policy = as_the_anchors(policy, manifest.statistics).for_stack(manifest.stack)
    if same_teacher:
        check_identity(manifest, teacher_identity(policy), cache=name)
    if labels:
        _require_labels(manifest, cache=name)
    by_reference = manifest.images == "reference"
    if dataset is None and (labels or by_reference):
        dataset = open_anchor_dataset(manifest.parts, policy, root=anchor_root)
    if dataset is not None:
        dataset.check_with(FrameDigests.read(reader))
    anchors = AnchorSet(
        reader,
        batch_size=batch_size,
        seed=seed,
        kinds=kinds,
        images=dataset if by_reference else None,
        held_out_share=held_out_share,
    )
    return OpenedAnchors(policy=policy, anchors=anchors, dataset=dataset)


def _require_labels(manifest: Manifest, *, cache: str) -> None:
    """Refuse rows of no dataset for modes that need labels."""
    if manifest.made and not manifest.has_dataset:
        raise CraftError(
            f"The cache {cache} has no labels.",
            why=f"it holds {manifest.made.describe()}; replay and ewc need rows of a dataset.",
            fix="use --mode hidden+action, which needs the teacher's answers alone, or a cache of "
            "frames.",
        )


def open_live_anchors(
    config: TrainConfig, student: Checkpoint, plan_for: Planning, *, resumed: Path | None = None
) -> LiveAnchors:
    """Open the teacher of a run that asks it at every step; `plan_for` chooses its anchors."""
    teacher = open_live_teacher(config, student)
    plan = plan_for(teacher.checkpoint)
    return LiveAnchors(
        plan,
        teacher,
        kinds=[Kind(mode) for mode in _IMITATED if mode in config.modes],
        batch_size=config.anchors_a_step(student.adapter.samples_per_anchor, varied=plan.varied),
        seed=config.seed,
        known=LiveRecord.read(resumed) if resumed else None,
    )


def open_terms(
    config: TrainConfig,
    student: Checkpoint,
    cache: Location,
    *,
    resumed: Path | None = None,
    live: LiveAnchors | None = None,
    weighs_rows: bool = True,
) -> RetentionTerms:
    """Open the terms of a run; the student must be the cache's teacher unless the run resumes.

    `resumed` is the folder of a resumed run: its student no longer equals the teacher. With `live`
    anchors no cache is opened. Without `weighs_rows` all anchors count alike and ε is the same for
    every policy, as in runs of earlier versions.
    """
    imitated = [mode for mode in _IMITATED if mode in config.modes]
    labelled = [mode for mode in _LABELLED if mode in config.modes]
    terms: list[Term] = []
    opened = None
    world = Processes.from_environment().world
    if live is not None:
        adapter, loss = student.adapter, config.loss
        terms.append(
            Imitation(
                imitated,
                live,
                student.policy,
                adapter,
                loss=loss,
                stride=world,
                weighs_rows=weighs_rows,
            )
        )
    elif imitated or labelled:
        reader = CacheReader.open(cache)
        opened = open_anchors(
            reader,
            student,
            kinds=[Kind(mode) for mode in imitated],
            batch_size=config.anchors_a_step(
                student.adapter.samples_per_anchor, varied=reader.manifest.varied
            ),
            seed=config.seed,
            anchor_root=config.anchor_root,
            labels=bool(labelled),
            same_teacher=not config.other_student and resumed is None,
            held_out_share=config.held_out_share if config.compares_anchors else 0.0,
        )
        if imitated:
            terms.append(
                opened.imitation(imitated, loss=config.loss, stride=world, weighs_rows=weighs_rows)
            )
        if labelled and opened.dataset:
            replay = Replay(opened.anchors, opened.dataset, student.policy)
            terms += _labelled_terms(config, student, replay, resumed)
    if Mode.L2SP in config.modes:
        terms.append(_distance(student, Mode.L2SP, resumed))
    anchors = live or (opened.anchors if opened else None)
    epsilon = DEFAULT_EPSILON
    if imitated and anchors and weighs_rows:
        epsilon = student.adapter.epsilon_of(anchors.manifest.stack)
    return RetentionTerms(terms, anchors, default_epsilon=epsilon, weighs_rows=weighs_rows)


def _labelled_terms(
    config: TrainConfig, student: Checkpoint, replay: Replay, resumed: Path | None
) -> list[Term]:
    terms: list[Term] = [replay] if Mode.REPLAY in config.modes else []
    if Mode.EWC in config.modes:
        importance = None if resumed else replay.fisher(config.fisher_samples)
        terms.append(_distance(student, Mode.EWC, resumed, importance))
    return terms


def _distance(
    student: Checkpoint,
    mode: Mode,
    resumed: Path | None,
    importance: dict[str, Tensor] | None = None,
) -> WeightDistance:
    if resumed:
        return WeightDistance.load(student.policy, resumed / f"{mode}_{WEIGHTS_FILE}", mode)
    return WeightDistance(student.policy, trainable_weights(student.policy), importance)


def kept_files(folder: Path) -> list[Path]:
    """The files that `keep_weights` has written to the folder of a run."""
    return sorted([*folder.glob(f"*_{WEIGHTS_FILE}"), *folder.glob(LIVE_FILE)])


def keep_weights(terms: RetentionTerms, folder: Path) -> None:
    """Save what a resumed run is held to: weights, or what identifies a live teacher."""
    if isinstance(terms.anchors, LiveAnchors):
        terms.anchors.save(folder)
    for term in terms:
        if isinstance(term, WeightDistance):
            term.save(folder / f"{term.mode}_{WEIGHTS_FILE}")
