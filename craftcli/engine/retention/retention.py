"""The retention constraint, applied in every K-th training step.

    retention = Retention.open("anchors.zarr", policy, total_steps=1000)
    ...
    task_loss.backward(); report = retention.apply(step); optimizer.step()

`craft train` uses the same class, with its own processes and precision.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from craftcli.choices import Amp, Constraints, Controller, Mode, ProjectWhen, SurgeryScope
from craftcli.config.retention import RetentionConfig
from craftcli.config.train import TrainConfig
from craftcli.engine.execution import Execution, Work
from craftcli.engine.method.budget import Budget
from craftcli.engine.method.constraint import Constraint, Note
from craftcli.engine.method.gradients import (
    Gradients,
    Products,
    product_table,
    unpack_products,
)
from craftcli.engine.method.held_out import EVERY
from craftcli.engine.method.losses import RetentionLoss
from craftcli.engine.method.multiplier import Multiplier
from craftcli.engine.method.parameter_groups import layer_groups, optimizer_groups
from craftcli.engine.method.projection import ProjectionReport, merge_known_, plain_weights
from craftcli.engine.metrics import RetentionReport
from craftcli.engine.retention.anchors import NumberedAnchors
from craftcli.engine.retention.opening import open_terms
from craftcli.engine.retention.own_loop import loop_execution, loop_student
from craftcli.engine.retention.self_check import require_self_check, self_check
from craftcli.engine.retention.terms import RetentionTerms
from craftcli.engine.retention.turn_losses import TurnLosses
from craftcli.engine.transfers import read_together
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.locations import Location, locate
from craftcli.policies.base import Policy
from craftcli.policies.lerobot.checkpoint import Checkpoint

_JOINT = "joint"
"""The name of the one constraint that all modes share."""
_LOOP_BATCH = 32
"""What a training loop of the user's own is taken to have, whose batch size is unknown."""
MEASURE_EVERY = 10
"""Steps between two measurements of the angle between the gradients while L_ret keeps to ε."""


class Retention:
    """Holds a student to its teacher by one or several terms."""

    def __init__(
        self,
        terms: RetentionTerms,
        policy: Policy,
        config: RetentionConfig,
        *,
        total_steps: int,
        execution: Execution | None = None,
    ) -> None:
        self.terms = terms
        self.modes = terms.modes
        self.config = config
        self.execution = execution or Execution(policy)
        self._policy = policy
        names = self.modes if config.constraints is Constraints.EACH else (_JOINT,)
        self._constraints = {
            name: _constraint(config, terms.default_epsilon, total_steps) for name in names
        }
        self._groups: list[int] | None = None

    @classmethod
    def open(
        cls,
        cache: str | Location,
        policy: Checkpoint | Policy,
        config: RetentionConfig | None = None,
        *,
        total_steps: int,
        preprocess: Any = None,
        accelerator: Any = None,
        amp: Amp = Amp.OFF,
        scaler: GradScaler | None = None,
        seed: int = 0,
        anchor_root: str | None = None,
        other_student: bool = False,
    ) -> Self:
        """Open retention for your own training loop, after the loop has prepared the policy.

        Args:
            cache: The folder or URL that `craft cache build` wrote.
            policy: The result of `load_checkpoint`, or a LeRobot policy together with its
                `preprocess`, not wrapped by anything. Its parameters are those that are trained.
            config: How to retain; the defaults are those of `craft train`. Set its
                `anchor_batch_size` to about an eighth of your batch, a quarter if anchors are
                variations of frames, half for a diffusion policy; by default it is 4, 8 or 16.
            total_steps: The length of ε's schedule.
            preprocess: The preprocessor of a bare policy.
            accelerator: The loop's `Accelerator`, if it has one; it decides the precision.
            amp: Precision of forward passes in a loop without accelerate.
            scaler: The loop's `GradScaler`, if it scales its losses.
            seed: Decides the order of anchors.
            anchor_root: Folder of the anchors' dataset, if it has moved.
            other_student: Allow a policy that is not, or no longer, the cache's teacher.

        Raises:
            CraftError: The cache does not fit the policy, or cannot be read.
        """
        config = config or RetentionConfig()
        if not config.retains:
            raise CraftError(
                "There is nothing to retain.",
                why="the mode is none.",
                fix="leave Retention out of the loop, or choose another mode.",
                exit_code=EXIT_USAGE,
            )
        student = loop_student(policy, preprocess)
        given = {field.name: getattr(config, field.name) for field in fields(config)}
        settings = TrainConfig(
            **given,
            batch_size=_LOOP_BATCH,
            steps=total_steps,
            seed=seed,
            anchor_root=anchor_root,
            # The files of a policy in memory are unknown; the self-check below compares it.
            other_student=other_student or student is not policy,
        )
        execution = loop_execution(student.policy, accelerator, amp=amp, scaler=scaler)
        terms = open_terms(settings, student, locate(cache))
        check = None if other_student else self_check(terms, execution)
        if check is not None:
            require_self_check(check)
        return cls(terms, student.policy, config, total_steps=total_steps, execution=execution)

    def __repr__(self) -> str:
        return f"Retention({'+'.join(self.modes)}, {self._constraints!r}, {self.anchors!r})"

    @property
    def anchors(self) -> NumberedAnchors | None:
        """The anchors; None if only weights are held."""
        return self.terms.anchors

    @property
    def waited_s(self) -> float:
        """How long the inputs of anchors have been waited for since the start."""
        return self.anchors.waited_s if self.anchors else 0.0

    @property
    def lam(self) -> float:
        """The current λ, summed over the constraints."""
        return sum(constraint.lam for constraint in self._constraints.values())

    @property
    def follows_earlier_rule(self) -> bool:
        """Whether λ moves by the rule of earlier versions, because the run started with it."""
        return any(c.follows_earlier_rule for c in self._constraints.values())

    def epsilon(self, step: int) -> float:
        """The budget at a step, averaged over the constraints."""
        budgets = [constraint.epsilon(step) for constraint in self._constraints.values()]
        return sum(budgets) / len(budgets)

    def group_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the optimizer's parameter groups as groups of the projection, if so configured."""
        if self.config.surgery is SurgeryScope.PER_GROUP:
            self._groups = optimizer_groups(self._trainable(), optimizer.param_groups)

    def apply(self, step: int) -> RetentionReport | None:
        """Merge retention into the task gradients in `.grad`; None in steps without retention.

        Steps count from 0; every K-th has retention, the first included. Call it between `backward`
        and the optimizer. It also takes the multiplier's step, which depends on L_ret
        and, with held-out anchors, L_held (`method/held_out.py`).
        """
        report = self.merge(step)
        # The caller skips a step that is not finite, and λ must not learn from it.
        return self.update(step, report) if report and report.finite else report

    def merge(self, step: int) -> RetentionReport | None:
        """`apply` without the multiplier's step, which `update` takes."""
        if step % self.config.retention_every:
            return None
        turn = self._turn(step)
        parameters = self._trainable()
        task = _take_gradients(parameters)
        # Before the backward pass: FSDP2 keeps the whole weights from a forward pass until then.
        held_out = self._measure_held_out(turn)
        seen: list[dict[str, Tensor]] = []
        self.execution.accumulate(self._works(turn, seen))
        ret = _take_gradients(parameters)
        measured = TurnLosses.of(seen, held_out)
        losses, held, products = self._read(measured, task, ret)
        self._observe_held_out(losses, held)
        projects = self._projects(step, losses)
        merged, angle = merge_known_(
            task,
            ret,
            products,
            threshold=self.config.conflict_threshold,
            project=projects,
            merge=self.config.merge,
            lam=self._weight(turn),
            groups=self._projection_groups(),
        )
        for parameter, gradient in zip(parameters, merged, strict=True):
            parameter.grad = gradient
        return self._report(step, losses, held, angle, projected=projects and angle.conflict)

    def joins(self, step: int) -> bool:
        """Whether one backward pass of a L_task + b L_ret does what `merge` does in this step.

        It does if nothing is projected: while L_ret keeps to ε, as far as the last turn tells. Then
        the gradients need not be told apart. Some steps take two passes all the same, to measure
        their angle: the first ones, and one in ten.
        """
        config = self.config
        if config.retention_every > 1 or config.merge.replaces_projection:
            return False
        if step < MEASURE_EVERY or step % MEASURE_EVERY == MEASURE_EVERY - 1:
            return False
        if config.surgery is SurgeryScope.NONE:
            return True
        always = config.project_when is ProjectWhen.CONFLICT
        return not always and not any(c.violated for c in self._constraints.values())

    def join(self, step: int, tasks: Sequence[Work]) -> tuple[Tensor, TurnLosses]:
        """Compute the gradient of a L_task + b L_ret in one backward pass; for steps that `joins`.

        `tasks` compute the losses of the task's batches. Returns their mean in this process, and
        the losses of the turn. When their values have been read, together with whatever else the
        step reads, `report` takes them. Between processes there is one reduction.
        """
        turn = self._turn(step)
        held_out = self._measure_held_out(turn)
        weights = plain_weights(self.config.merge, self._weight(turn))
        seen: list[dict[str, Tensor]] = []
        task_losses: list[Tensor] = []

        def both(task: Work, anchors: Work) -> Tensor:
            loss = task()
            task_losses.append(loss.detach().float())
            return weights.task * loss + weights.ret * anchors()

        pairs = zip(tasks, self._works(turn, seen), strict=True)
        self.execution.accumulate([functools.partial(both, *pair) for pair in pairs])
        return torch.stack(task_losses).mean(), TurnLosses.of(seen, held_out)

    def report(self, step: int, joined: TurnLosses, values: Sequence[float]) -> RetentionReport:
        """The report of a step that `join` took, from the losses' means over all processes."""
        losses, held_out = joined.by_name(values)
        self._observe_held_out(losses, held_out)
        return self._report(step, losses, held_out, None, projected=False)

    def update(self, step: int, report: RetentionReport) -> RetentionReport:
        """Take the multiplier's step after a turn; returns its report with notes for the user."""
        by_constraint = self._by_constraint(report.losses)
        ratio = _gradient_ratio(report.gradients)
        lam = self.lam
        notes: list[Note] = []
        for name, constraint in self._constraints.items():
            # The λ of all constraints together is bounded: each has its share of the bound.
            own = ratio if ratio is None or not lam else ratio * constraint.lam / lam
            notes += constraint.update(by_constraint[name], step, gradient_ratio=own)
        return report.with_notes(notes)

    def losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The loss of every mode on the anchor batch with this number, with gradients."""
        return self.terms.losses(number)

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {name: c.state_dict() for name, c in self._constraints.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        for name, constraint in self._constraints.items():
            constraint.load_state_dict(state[name])

    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self._policy.parameters() if p.requires_grad]

    def _projection_groups(self) -> list[int] | None:
        if self._groups is None and self.config.surgery is SurgeryScope.PER_LAYER:
            # Only now: parameters may be frozen between the constructor and the first step.
            named = self._policy.named_parameters()
            self._groups = layer_groups([name for name, p in named if p.requires_grad])
        return self._groups

    def _turn(self, step: int) -> int:
        return step // self.config.retention_every

    def _weight(self, turn: int) -> float:
        return sum(constraint.weight(turn) for constraint in self._constraints.values())

    def _read(
        self, measured: TurnLosses, task: Gradients, ret: Gradients
    ) -> tuple[dict[str, float], dict[str, float], list[Products]]:
        """Read what decides a turn in one transfer: losses, held-out losses, inner products."""
        table = product_table(task, ret, groups=self._projection_groups())
        if self.execution.sharded:
            means, table = self.execution.reduce(measured.values, table)
        else:  # every process has the whole gradients, and they are the same
            means, _ = self.execution.reduce(measured.values)
        values, rows, (scale,) = read_together(means, table, self.execution.scale)
        return *measured.by_name(values), unpack_products(rows, scale=scale)

    def _works(self, turn: int, seen: list[dict[str, Tensor]]) -> list[Work]:
        """What computes L_ret on each of this process's anchor batches, and adds to `seen`."""
        processes, count = self.execution.processes, self.config.grad_accum
        shares = self._shares(turn)
        return [
            functools.partial(
                self._weighted_loss, number * processes.world + processes.rank, shares, seen
            )
            for number in range(turn * count, (turn + 1) * count)
        ]

    def _measure_held_out(self, turn: int) -> dict[str, Tensor]:
        """The loss of each mode on held-out anchors; empty in turns that do not measure it."""
        if self.anchors is None or self.anchors.held_out is None or turn % EVERY:
            return {}
        processes = self.execution.processes
        number = turn // EVERY * processes.world + processes.rank
        modes: list[Mode] = []

        def work() -> Tensor:
            losses = self.terms.held_out_losses(number)
            modes.extend(losses)
            return torch.stack([loss.total for loss in losses.values()])

        losses = self.execution.measure(work)
        return {mode.value: loss for mode, loss in zip(modes, losses, strict=True)}

    def _observe_held_out(self, losses: Mapping[str, float], held_out: Mapping[str, float]) -> None:
        """Show every constraint its loss on held-out anchors; weights have no such loss."""
        if all(map(math.isfinite, held_out.values())):
            for name, loss in self._by_constraint({**losses, **held_out}).items():
                if held_out and (name == _JOINT or name in held_out):
                    self._constraints[name].observe_held_out(loss)

    def _weighted_loss(
        self, number: int, shares: dict[Mode, float], seen: list[dict[str, Tensor]]
    ) -> Tensor:
        losses = self.terms.losses(number)
        details = {f"{m}.{n}": v for m, loss in losses.items() for n, v in loss.per_layer.items()}
        seen.append({**{m.value: loss.total.detach() for m, loss in losses.items()}, **details})
        return torch.stack([shares[mode] * loss.total for mode, loss in losses.items()]).sum()

    def _shares(self, turn: int) -> dict[Mode, float]:
        """The weight of each mode within the retention gradient; the weights sum to 1."""
        equal = 1 / len(self.modes)
        if self.config.constraints is Constraints.JOINT:
            return dict.fromkeys(self.modes, equal)
        weights = {mode: self._constraints[mode].weight(turn) for mode in self.modes}
        total = sum(weights.values())
        return {mode: w / total if total else equal for mode, w in weights.items()}

    def _by_constraint(self, losses: Mapping[str, float]) -> dict[str, float]:
        joint = self._mean(losses)
        return {name: losses.get(name, joint) for name in self._constraints}

    def _violated(self, step: int, losses: Mapping[str, float]) -> bool:
        return any(
            self._constraints[name].binding(loss) > self._constraints[name].epsilon(step)
            for name, loss in self._by_constraint(losses).items()
        )

    def _budget_used(self, step: int, losses: Mapping[str, float]) -> float | None:
        """L_ret / ε, the largest of the constraints; None without an ε above 0."""
        budgets = {name: c.epsilon(step) for name, c in self._constraints.items()}
        if not all(0 < epsilon < math.inf for epsilon in budgets.values()):
            return None
        return max(loss / budgets[name] for name, loss in self._by_constraint(losses).items())

    def _projects(self, step: int, losses: Mapping[str, float]) -> bool:
        if self.config.surgery is SurgeryScope.NONE or self.config.merge.replaces_projection:
            return False
        always = self.config.project_when is ProjectWhen.CONFLICT
        return always or self._violated(step, losses)

    def _mean(self, losses: Mapping[str, float]) -> float:
        return sum(losses[mode] for mode in self.modes) / len(self.modes)

    def _report(
        self,
        step: int,
        losses: Mapping[str, float],
        held_out: Mapping[str, float],
        seen: ProjectionReport | None,
        *,
        projected: bool,
    ) -> RetentionReport:
        """The report of a turn; `seen` is None if the gradients were not told apart."""
        return RetentionReport(
            loss=self._mean(losses),
            held_out=self._mean({**losses, **held_out}) if held_out else None,
            lam=self.lam,
            epsilon=self.epsilon(step),
            gradients=seen,
            projected=projected,
            violated=self._violated(step, losses),
            budget_used=self._budget_used(step, losses),
            at_maximum=any(c.at_maximum for c in self._constraints.values()),
            bounded=any(c.bounded for c in self._constraints.values()),
            losses=losses,
            lams={name: c.lam for name, c in self._constraints.items()},
        )


def open_retention(config: TrainConfig, student: Checkpoint, cache: Location) -> Retention:
    """The retention of a training run in one process and in full precision."""
    terms = open_terms(config, student, cache)
    return Retention(terms, student.policy, config, total_steps=config.steps)


def _constraint(config: RetentionConfig, default_epsilon: float, total_steps: int) -> Constraint:
    gains: dict[str, Any] = {}
    if config.controller is Controller.NUPI:
        gains = {"kp": config.lambda_kp, "nu": config.lambda_nu}
    multiplier = Multiplier(
        value=config.lambda_init,
        lr=config.lambda_lr,
        maximum=config.lambda_max,
        every=config.retention_every,
        **gains,
    )
    start, end = config.budget(default_epsilon)
    budget = Budget(schedule=config.schedule, start=start, end=end, total_steps=total_steps)
    return Constraint(multiplier, budget, warmup_turns=config.lambda_warmup)


def _take_gradients(parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """Move the gradients out of the parameters, without copying them."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _gradient_ratio(seen: ProjectionReport | None) -> float | None:
    """|g_task| / |g_ret|; None if they were not told apart, or there was nothing to retain yet."""
    return seen.task_norm / seen.ret_norm if seen and seen.ret_norm > 0 else None
