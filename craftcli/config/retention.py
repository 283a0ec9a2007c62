"""Settings of the retention constraint: what is held, how closely, and how gradients are merged."""

from dataclasses import dataclass
from typing import override

from craftcli.choices import (
    Constraints,
    Controller,
    LossKind,
    Merge,
    Mode,
    ProjectWhen,
    Schedule,
    SurgeryScope,
)
from craftcli.config.parsing import joined_problems, split_joined
from craftcli.config.settings import Settings, setting

DEFAULT_EPSILON = 0.02
"""Two hundredths of the teacher's variance may drift. This kept the behaviour in the demo."""

SAMPLES_PER_ANCHOR = 8
"""Samples of the task for each anchor, unless a family of policies needs more anchors.
examples/metaworld_forgetting measures other shares."""
SAMPLES_PER_VARIATION = 4
"""The same where anchors are variations of few frames. With 16 frames 8 anchors beside 32 samples
kept 0.92 of an old task, 4 anchors 0.78 (ACT, the seed that settings are chosen with)."""
FEWEST_ANCHORS = 2
"""With a single anchor a step, old and new success fall."""

PANEL = "Retention"
_GRADIENTS = "Gradients"
_BUDGET = "Budget and multiplier"


@dataclass(frozen=True, kw_only=True)
class RetentionConfig(Settings):
    """How the student is held to its teacher."""

    mode: str = setting(
        "hidden+action",
        "What to retain: hidden (hidden states), action (outputs), token_ce (tokens), replay (old "
        "labels), l2sp or ewc (weights), none, or several as in hidden+action.",
        metavar="MODE",
        panel=PANEL,
    )
    loss: LossKind = setting(
        LossKind.NMSE,
        "Distance to the teacher. nmse is the share of the teacher's variance that drifted.",
        panel=PANEL,
    )
    anchor_batch_size: int | None = setting(
        None,
        "Anchors per retention step and process. Default: an eighth of --batch-size, a quarter if "
        "anchors are variations of frames, half for a diffusion policy; at least 2.",
        low=1,
        panel=PANEL,
    )
    held_out_share: float = setting(
        0.0,
        "Share of the anchors that is not trained on, as 0.1. λ then also sees L_held, the loss on "
        "these, measured every 10 retention steps, and a warning tells when anchors are too few.",
        low=0,
        high=0.5,
        panel=PANEL,
    )
    retention_every: int = setting(
        1,
        "Take a retention step every N steps. More than 1 is cheaper and retains less.",
        low=1,
        panel=PANEL,
    )
    grad_accum: int = setting(
        1,
        "Batches of the task and of anchors to accumulate into one optimizer step.",
        low=1,
        panel="Optimization",
    )
    surgery: SurgeryScope = setting(
        SurgeryScope.GLOBAL,
        "Remove the part of the task gradient that opposes retention. Decide it over all "
        "parameters, per layer, per optimizer group, or never.",
        panel=_GRADIENTS,
    )
    conflict_threshold: float = setting(
        -0.1,
        "Project when the cosine of the two gradients is below this.",
        low=-1,
        high=1,
        panel=_GRADIENTS,
    )
    project_when: ProjectWhen = setting(
        ProjectWhen.VIOLATED,
        "Project only while L_ret is above ε, which uses the whole budget, or in every conflict, "
        "which retains more and learns less.",
        panel=_GRADIENTS,
    )
    merge: Merge = setting(
        Merge.WEIGHTED, "How to merge the two gradients into one.", panel=_GRADIENTS
    )
    constraints: Constraints = setting(
        Constraints.JOINT,
        "With several modes: one budget and one λ for all of them, or one of each per mode.",
        panel=PANEL,
    )
    fisher_samples: int = setting(
        256,
        "Anchors from which --mode ewc estimates how much each weight matters.",
        low=1,
        panel=PANEL,
    )
    controller: Controller = setting(
        Controller.ASCENT,
        "How λ follows the violation of the budget: gradient ascent, or the νPI controller.",
        panel=_BUDGET,
    )
    lambda_init: float = setting(1.0, "First value of λ.", low=0, panel=_BUDGET)
    lambda_lr: float = setting(
        0.02,
        "Step size of λ, per violation in units of ε. Raise it when L_ret stays above ε for long.",
        low=0,
        panel=_BUDGET,
    )
    lambda_max: float = setting(
        10.0, "Upper bound of λ. Raise it when λ stays there.", low=0, panel=_BUDGET
    )
    lambda_kp: float = setting(1.0, "Proportional gain of --controller nupi.", low=0, panel=_BUDGET)
    lambda_nu: float = setting(
        0.0,
        "Smoothing of the violation by --controller nupi.",
        above=-1,
        high=0.999,
        panel=_BUDGET,
    )
    lambda_warmup: int = setting(
        0,
        "Retention steps over which the weight of retention rises from 0 to λ.",
        low=0,
        panel=_BUDGET,
    )
    epsilon_start: float | None = setting(
        None,
        "Budget ε for L_ret, or its first value under a schedule. Lower it to retain more, raise "
        "it to learn more. Default: 0.02 where the loss is a share of the teacher's variance or "
        "a divergence of tokens (0.001 for a diffusion policy); found in the first steps for other "
        "losses.",
        low=0,
        aliases=("--epsilon",),
        panel=_BUDGET,
    )
    epsilon_end: float | None = setting(
        None, "Last value of ε, under a schedule that changes it.", low=0, panel=_BUDGET
    )
    epsilon_schedule: Schedule | None = setting(
        None,
        "How ε changes from start to end; auto finds it in the first steps. Default: constant, or "
        "auto for a loss without a common scale.",
        panel=_BUDGET,
    )

    @override
    def problems(self) -> list[str]:
        found = super().problems() + joined_problems("--mode", self.mode, Mode)
        if Mode.NONE in self.modes and len(self.modes) > 1:
            found.append("--mode none cannot be joined with another mode")
        if self.lambda_init > self.lambda_max:
            found.append("--lambda-init is above --lambda-max")
        return found + self._budget_problems()

    def _budget_problems(self) -> list[str]:
        found = []
        moves = self.schedule not in (Schedule.CONSTANT, Schedule.AUTO)
        if moves and self.epsilon_end is None:
            found.append(f"--epsilon-schedule {self.epsilon_schedule} needs --epsilon-end")
        if not moves and self.epsilon_end is not None:
            found.append("--epsilon-end needs an --epsilon-schedule that changes ε")
        if self.schedule is Schedule.AUTO and self.epsilon_start is not None:
            found.append("--epsilon-start is not used by --epsilon-schedule auto")
        if moves and self.epsilon_start is None and not self.scale_known:
            found.append(f"--epsilon-schedule {self.epsilon_schedule} needs --epsilon-start here")
        if self.schedule is Schedule.EXPONENTIAL and 0 in self.budget():
            found.append("an exponential schedule needs --epsilon-start and --epsilon-end above 0")
        return found

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of retention; the single mode `none` retains nothing."""
        return split_joined(self.mode, Mode)

    @property
    def retains(self) -> bool:
        """Whether anything is retained."""
        return self.modes != (Mode.NONE,)

    @property
    def uses_anchors(self) -> bool:
        """Whether any mode needs the rows of a cache."""
        return not {Mode.NONE, Mode.L2SP}.issuperset(self.modes)

    @property
    def compares_anchors(self) -> bool:
        """Whether a loss is computed on anchors in every retention turn."""
        return not {Mode.NONE, Mode.L2SP, Mode.EWC}.issuperset(self.modes)

    @property
    def scale_known(self) -> bool:
        """Whether a loss of 0.02 means the same for every policy."""
        relative = {Mode.HIDDEN, Mode.ACTION, Mode.NONE}
        return self.loss is LossKind.NMSE and relative.issuperset(self.modes)

    @property
    def schedule(self) -> Schedule:
        """How ε changes: the chosen schedule, or the default for this loss."""
        if self.epsilon_schedule is not None:
            return self.epsilon_schedule
        known = self.scale_known or self.epsilon_start is not None
        return Schedule.CONSTANT if known else Schedule.AUTO

    def budget(self, default_epsilon: float = DEFAULT_EPSILON) -> tuple[float, float]:
        """ε at the start and at the end, where the policy's family has this default."""
        start = default_epsilon if self.epsilon_start is None else self.epsilon_start
        return start, start if self.epsilon_end is None else self.epsilon_end
