"""Judges a run by its own figures: was L_ret within its budget, and if not, what kept it above?"""

from dataclasses import dataclass
from typing import Self

from craftcli.cache.format import Manifest
from craftcli.choices import Merge
from craftcli.config.train import TrainConfig
from craftcli.engine.budget_record import BudgetRecord
from craftcli.engine.retention.gradient_reach import percent
from craftcli.engine.verdict import Outcome, Verdict

FEW_TURNS = 10
"""Retention turns below which nothing can be said."""
FAR = 1.5
"""L_ret / ε from which on the old skill is probably not kept."""
FAR_FOR_MADE = 5.0
"""The same for anchors that were made. They reach further than the old data, and so does L_ret:
runs in Meta-World that ended at 1.4 to 4.2 times ε kept 0.66 to 1.00 of the old skill. It is no
promise: in a sequence of tasks one of three old skills was lost at 1.4 times ε."""
FEW_FRAMES = 64
"""Frames as they are, without variations, that say too little: in Meta-World 4 and 16 of them kept
0.00 and 0.39 of pick-place; earlier runs, 0.05 and 0.20 with L_ret at 0.3 and 0.4 times ε."""
REACHING = {"augment", "statistics"}
"""Ways to make anchors that lie where no frame of the data lies."""
MANY_SKIPPED = 0.1
"""The share of skipped steps from which on the verdict names them."""


@dataclass(frozen=True, kw_only=True)
class AnchorCount:
    """What a run was held on."""

    rows: int
    frames: int
    """Rows that are frames of the data as they are."""
    reaching: bool
    """Whether some were made where no frame of the data lies."""

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Count the rows of a cache."""
        made = manifest.made
        return cls(
            rows=manifest.rows,
            frames=manifest.rows - (made.rows if made else 0),
            reaching=made is not None and not REACHING.isdisjoint(made.source.split("+")),
        )

    @property
    def few(self) -> bool:
        """Whether a policy can learn all of them by heart."""
        return not self.reaching and self.frames < FEW_FRAMES


def judge(
    record: BudgetRecord,
    config: TrainConfig,
    *,
    step: int,
    skipped: int,
    free_share: float,
    anchors: AnchorCount | None,
) -> Verdict:
    """Judge a run by its record; `free_share` is what `OpenedRun.free_share` found."""
    outcome = _outcome(record, config, free_share, anchors)
    return Verdict(
        outcome=outcome,
        step=step,
        finding=_finding(outcome, record, config, free_share, anchors) + _skipping(skipped, step),
        advice=_advice(outcome, record, config, free_share),
        budget_used=record.used,
        above_share=record.above / record.turns if record.turns else None,
        held_out_used=record.held,
        lam=record.lam,
        lam_at_maximum=record.at_maximum,
        lam_bounded=record.bounded,
        lam_rising=record.rising,
        free_share=free_share,
        anchors=anchors.rows if anchors else None,
        turns=record.turns,
        since=record.since,
        skipped=skipped,
    )


def _outcome(
    record: BudgetRecord, config: TrainConfig, free_share: float, anchors: AnchorCount | None
) -> Outcome:
    if not config.retains:
        return Outcome.NOTHING_HELD
    if record.used is None or record.turns < FEW_TURNS:
        return Outcome.UNKNOWN
    if record.used > 1 or _worst(record) > 1:
        return Outcome.EXCEEDED
    if free_share:
        return Outcome.PART_FREE
    # L_held has seen frames that were not trained on.
    unseen = anchors is not None and anchors.few and record.held is None
    return Outcome.FEW_ANCHORS if unseen else Outcome.WITHIN


def _worst(record: BudgetRecord) -> float:
    """The larger of L_ret and L_held, in units of ε."""
    return max(record.used or 0.0, record.held or 0.0)


def _finding(
    outcome: Outcome,
    record: BudgetRecord,
    config: TrainConfig,
    free_share: float,
    anchors: AnchorCount | None,
) -> str:
    if outcome is Outcome.NOTHING_HELD:
        return "Nothing was held (--mode none): the old skill may be lost."
    if outcome is Outcome.UNKNOWN:
        return _unknown(record, config)
    figures = _figures(record)
    match outcome:
        case Outcome.WITHIN:
            return f"{figures}: within its budget. craft eval shows whether the old skill is kept."
        case Outcome.PART_FREE:
            return (
                f"{figures}: within its budget, but {percent(free_share)} of the trained weights "
                "lie behind what is held and are free: the old skill may be lost."
            )
        case Outcome.FEW_ANCHORS if anchors:
            return (
                f"{figures}: within its budget, but on {anchors.frames} frames, which a policy "
                "learns by heart: the old skill may be lost everywhere else."
            )
        case _:
            return f"{figures}: {_over_budget(_worst(record), anchors)}"


def _over_budget(used: float, anchors: AnchorCount | None) -> str:
    reaching = anchors is not None and anchors.reaching
    if used > (FAR_FOR_MADE if reaching else FAR):
        return "the old skill is probably not kept."
    further = " The anchors were made and reach further than the old data." if reaching else ""
    return f"over its budget.{further} craft eval shows whether the old skill is kept."


def _figures(record: BudgetRecord) -> str:
    above = percent(record.above / record.turns)
    since = f" since step {record.since}" if record.since else ""
    used = _times(record.used or 0.0)
    figures = f"L_ret ended at {used} ε and was above it in {above} of the steps{since}"
    if record.held is not None and record.held > 1:
        figures += f"; L_held, on anchors that are not trained on, at {_times(record.held)} ε"
    return figures


def _times(ratio: float) -> str:
    """A multiple, with two digits if it is small.

    >>> _times(2.94), _times(0.0213), _times(6543.2)
    ('2.9 x', '0.021 x', '6,543 x')
    """
    return f"{ratio:.2g} x" if ratio < 10 else f"{ratio:,.0f} x"


def _unknown(record: BudgetRecord, config: TrainConfig) -> str:
    if record.turns:
        return f"Too few retention steps to judge the budget: {record.turns}."
    if 0 in config.budget():
        return "There is no budget to judge by: ε is 0. craft eval measures what was kept."
    return "There is no budget to judge by: no ε was found in so few steps."


def _skipping(skipped: int, step: int) -> str:
    if skipped <= MANY_SKIPPED * step:
        return ""
    return f" {skipped} of {step} steps were skipped because they were not finite: lower --lr."


def _advice(
    outcome: Outcome, record: BudgetRecord, config: TrainConfig, free_share: float
) -> str | None:
    parts = []
    if outcome is Outcome.EXCEEDED:
        within = record.used is not None and record.used <= 1
        parts.append(_more_anchors() if within else _more_weight(record, config))
    if outcome is Outcome.FEW_ANCHORS:
        parts.append(
            "Vary them (craft cache build --augment 63; train --old-dataset does so by itself), "
            "or use more frames."
        )
    if free_share and outcome in (Outcome.EXCEEDED, Outcome.PART_FREE):
        parts.append("Use --freeze-downstream or --mode hidden+action.")
    return " ".join(parts) or None


def _more_anchors() -> str:
    """L_ret is fine and L_held is not: the anchors are too few to stand for the old data."""
    return "Use more anchors: --anchor-samples, or craft cache build --samples."


def _more_weight(record: BudgetRecord, config: TrainConfig) -> str:
    """What kept λ from bringing L_ret down."""
    if config.merge is not Merge.WEIGHTED:
        return f"--merge {config.merge} limits the weight of retention: use --merge weighted."
    if config.lambda_lr == 0:
        return f"--lambda-lr 0 holds λ at {record.lam:.3g}: leave it out, or raise --lambda-init."
    if record.at_maximum:
        return f"λ is at its maximum of {config.lambda_max:g}: raise --lambda-max or lower --lr."
    if record.bounded:
        return (
            f"λ stays at {record.lam:.2g}, because the gradient of the anchors outweighs the "
            "task's, and that of few anchors is mostly noise: raise --anchor-batch-size (now "
            f"{config.anchors_a_step()}), take more --steps or lower --lr."
        )
    fixes = "raise --lambda-lr or --steps" if record.rising else "take more --steps or lower --lr"
    if config.retention_every > 1:
        fixes += ", or hold more often with --retention-every 1"
    still = f"λ is still rising ({record.lam:.3g} of {config.lambda_max:g}): "
    return f"{still}{fixes}." if record.rising else f"{fixes.capitalize()}."
