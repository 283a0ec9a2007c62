"""Opening the retention that the settings ask for: its cache, its data and its terms."""

from pathlib import Path

from torch import Tensor

from craftcli.cache.processes import Processes
from craftcli.cache.reader import CacheReader
from craftcli.choices import Kind, Mode
from craftcli.config import TrainConfig
from craftcli.engine.anchor_rows import open_anchor_rows
from craftcli.engine.anchors import AnchorSet
from craftcli.engine.compatibility import check_identity, check_known
from craftcli.engine.imitation import Imitation
from craftcli.engine.replay import Replay, trainable_weights
from craftcli.engine.retention import Retention
from craftcli.engine.terms import Term
from craftcli.engine.weight_distance import WeightDistance
from craftcli.locations import Location
from craftcli.policies.identity import teacher_identity
from craftcli.policies.loading import Checkpoint

_IMITATED = (Mode.HIDDEN, Mode.ACTION, Mode.TOKEN_CE)
_LABELLED = (Mode.REPLAY, Mode.EWC)


WEIGHTS_FILE = "retained_weights.safetensors"
"""In a run's folder: what a resumed run needs to hold weights."""


def open_retention(
    config: TrainConfig, student: Checkpoint, cache: Location, *, resumed: Path | None = None
) -> Retention:
    """The constraint from a cache that this very student's weights and processor made.

    `resumed` is the folder of a run that goes on: its student no longer is the teacher.
    """
    imitated = [mode for mode in _IMITATED if mode in config.modes]
    labelled = [mode for mode in _LABELLED if mode in config.modes]
    anchors, data = None, None
    if imitated or labelled:
        manifest = CacheReader.open(cache).manifest
        check_known(manifest, cache=str(cache))
        student = student.for_stack(manifest.stack)
        if not config.other_student and resumed is None:
            check_identity(manifest, teacher_identity(student), cache=str(cache))
        if labelled or manifest.images == "reference":
            data = open_anchor_rows(manifest.dataset, student, root=config.anchor_root)
        anchors = AnchorSet.open(
            cache,
            batch_size=config.anchor_batch_size,
            seed=config.seed,
            kinds=[Kind(mode) for mode in imitated],
            images=data if manifest.images == "reference" else None,
        )
    terms: list[Term] = []
    if anchors and imitated:
        terms.append(_imitation(config, student, anchors, imitated))
    if anchors and data and labelled:
        terms += _labelled_terms(config, student, Replay(anchors, data, student.policy), resumed)
    if Mode.L2SP in config.modes:
        terms.append(_distance(student, Mode.L2SP, resumed))
    return Retention(terms, student.policy, config, total_steps=config.steps, anchors=anchors)


def _imitation(
    config: TrainConfig, student: Checkpoint, anchors: AnchorSet, modes: list[Mode]
) -> Imitation:
    return Imitation(
        modes,
        anchors,
        student.policy,
        student.adapter,
        loss=config.loss,
        stride=Processes.from_environment().world,
    )


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


def keep_weights(retention: Retention, folder: Path) -> None:
    """Write what a resumed run needs of the terms that hold weights."""
    for term in retention.terms:
        if isinstance(term, WeightDistance):
            term.save(folder / f"{term.mode}_{WEIGHTS_FILE}")
