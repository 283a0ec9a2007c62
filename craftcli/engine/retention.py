"""The retention constraint, ready to be applied inside a training loop.

retention = Retention.open("anchors.zarr", policy, total_steps=1000)
...
task_loss.backward(); report = retention.apply(step); optimizer.step()
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from craftcli.choices import Amp, Constraints, Mode, ProjectWhen, SurgeryScope
from craftcli.config import RetentionConfig
from craftcli.engine.anchors import AnchorSet
from craftcli.engine.constraints import Constraint
from craftcli.engine.execution import Execution
from craftcli.engine.groups import layer_groups, optimizer_groups
from craftcli.engine.losses import RetentionLoss
from craftcli.engine.surgery import SurgeryReport, operate_
from craftcli.engine.terms import Term
from craftcli.locations import Location, locate
from craftcli.policies.base import Policy
from craftcli.report.metrics import RetentionReport

if TYPE_CHECKING:
    from craftcli.policies.loading import Checkpoint

_JOINT = "joint"
"""The name of the one constraint that all modes share."""


class Retention:
    """Holds a student to its teacher by one or several terms."""

    def __init__(
        self,
        terms: Sequence[Term],
        policy: Policy,
        config: RetentionConfig,
        *,
        total_steps: int,
        anchors: AnchorSet | None = None,
        execution: Execution | None = None,
    ) -> None:
        self.terms = tuple(terms)
        self.config = config
        self.anchors = anchors
        self.modes = tuple(mode for term in terms for mode in term.modes)
        self.execution = execution or Execution(policy)
        self._policy = policy
        names = self.modes if config.constraints is Constraints.EACH else (_JOINT,)
        self._constraints = {name: Constraint(config, total_steps=total_steps) for name in names}
        self._groups: list[int] | None = None

    @classmethod
    def open(
        cls,
        cache: str | Location,
        policy: "Checkpoint | Policy",
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
    ) -> "Retention":
        """Retention for a training loop of one's own, after the policy was prepared for it.

        Args:
            cache: The folder or URL that `craft cache build` wrote.
            policy: What `load_checkpoint` returned, or a LeRobot policy together with its
                `preprocess`, not wrapped by anything. Its parameters are those that are trained.
            config: How to retain; the defaults are those of `craft train`.
            total_steps: How long ε's schedule is.
            preprocess: The preprocessor of a bare policy.
            accelerator: accelerate's, when it runs the loop; it says the precision.
            amp: Precision of forward passes in a loop without accelerate.
            scaler: That loop's, when it scales its losses.
            seed: Decides the order of anchors.
            anchor_root: Folder of the anchors' dataset when it is no longer where it was.
            other_student: Allow a policy that is not, or no longer, the cache's teacher.

        Raises:
            CraftError: The cache does not fit the policy, or cannot be read.
        """
        from craftcli.engine.own_loop import open_in_loop  # it needs this class

        return open_in_loop(
            locate(cache),
            policy,
            config or RetentionConfig(),
            total_steps=total_steps,
            preprocess=preprocess,
            accelerator=accelerator,
            amp=amp,
            scaler=scaler,
            seed=seed,
            anchor_root=anchor_root,
            other_student=other_student,
        )

    def __repr__(self) -> str:
        return f"Retention({'+'.join(self.modes)}, {self._constraints!r}, {self.anchors!r})"

    @property
    def lam(self) -> float:
        """λ now, summed over the constraints."""
        return sum(constraint.lam for constraint in self._constraints.values())

    def epsilon(self, step: int) -> float:
        """The budget at a step, the mean over the constraints."""
        budgets = [constraint.epsilon(step) for constraint in self._constraints.values()]
        return sum(budgets) / len(budgets)

    def group_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer's parameter groups decide apart, if the settings ask for it."""
        if self.config.surgery is SurgeryScope.PER_GROUP:
            self._groups = optimizer_groups(self._trainable(), optimizer.param_groups)

    def apply(self, step: int) -> RetentionReport | None:
        """Add retention to the task gradients in `.grad`; None when this step has no turn.

        Steps count from 0 and the first has a turn. Call between `backward` and the optimizer. The
        dual step is taken here too: it depends on L_ret alone, not on what the optimizer does.
        """
        if step % self.config.retention_every:
            return None
        turn = step // self.config.retention_every
        parameters = self._trainable()
        if self._groups is None and self.config.surgery is SurgeryScope.PER_LAYER:
            # Not before: parameters may be frozen once it is known what retention reaches.
            named = self._policy.named_parameters()
            self._groups = layer_groups([name for name, p in named if p.requires_grad])
        task = take_gradients(parameters)
        losses = self._backward(turn)
        ret = take_gradients(parameters)
        projects = self._projects(step, losses)
        weight = sum(constraint.weight(turn) for constraint in self._constraints.values())
        merged, surgery = operate_(
            task,
            ret,
            threshold=self.config.conflict_threshold,
            project=projects,
            merge=self.config.merge,
            lam=weight,
            groups=self._groups,
            reduce=self.execution.total if self.execution.sharded else None,
            scale=self.execution.scale,
        )
        for parameter, gradient in zip(parameters, merged, strict=True):
            parameter.grad = gradient
        return self._conclude(step, losses, surgery, projected=projects and surgery.conflict)

    def losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The loss of every mode on the anchor batch of that number, with gradients."""
        return {mode: loss for term in self.terms for mode, loss in term.losses(number).items()}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {name: c.state_dict() for name, c in self._constraints.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for name, constraint in self._constraints.items():
            constraint.load_state_dict(state[name])

    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self._policy.parameters() if p.requires_grad]

    def _backward(self, turn: int) -> dict[str, float]:
        """Run this turn's anchors backward; the mean losses of modes and layers by name."""
        processes, count = self.execution.processes, self.config.grad_accum
        shares = self._shares(turn)
        seen: list[dict[str, Tensor]] = []
        works = [
            functools.partial(
                self._weighted, number * processes.world + processes.rank, shares, seen
            )
            for number in range(turn * count, (turn + 1) * count)
        ]
        self.execution.accumulate(works)
        table = torch.stack([torch.stack([s.float() for s in one.values()]) for one in seen])
        means: list[float] = self.execution.mean(table.mean(0)).tolist()
        return dict(zip(seen[0], means, strict=True))

    def _weighted(
        self, number: int, shares: dict[Mode, float], seen: list[dict[str, Tensor]]
    ) -> Tensor:
        losses = self.losses(number)
        details = {f"{m}.{n}": v for m, loss in losses.items() for n, v in loss.per_layer.items()}
        seen.append({**{m.value: loss.total.detach() for m, loss in losses.items()}, **details})
        return torch.stack([shares[mode] * loss.total for mode, loss in losses.items()]).sum()

    def _shares(self, turn: int) -> dict[Mode, float]:
        """How much each mode's gradient counts within the retention gradient; they sum to 1."""
        equal = 1 / len(self.modes)
        if self.config.constraints is Constraints.JOINT:
            return dict.fromkeys(self.modes, equal)
        weights = {mode: self._constraints[mode].weight(turn) for mode in self.modes}
        total = sum(weights.values())
        return {mode: w / total if total else equal for mode, w in weights.items()}

    def _by_constraint(self, losses: dict[str, float]) -> dict[str, float]:
        joint = sum(losses[mode] for mode in self.modes) / len(self.modes)
        return {name: losses.get(name, joint) for name in self._constraints}

    def _violated(self, step: int, by_constraint: dict[str, float]) -> bool:
        return any(
            loss > self._constraints[name].epsilon(step) for name, loss in by_constraint.items()
        )

    def _projects(self, step: int, losses: dict[str, float]) -> bool:
        if self.config.surgery is SurgeryScope.NONE:
            return False
        always = self.config.project_when is ProjectWhen.CONFLICT
        return always or self._violated(step, self._by_constraint(losses))

    def _conclude(
        self, step: int, losses: dict[str, float], surgery: SurgeryReport, *, projected: bool
    ) -> RetentionReport:
        by_constraint = self._by_constraint(losses)
        report = RetentionReport(
            loss=sum(losses[mode] for mode in self.modes) / len(self.modes),
            lam=self.lam,
            epsilon=self.epsilon(step),
            dot=surgery.dot,
            cos=surgery.cos,
            task_norm=surgery.task_norm,
            ret_norm=surgery.ret_norm,
            conflict=surgery.conflict,
            projected=projected,
            conflict_share=surgery.conflict_share,
            violated=self._violated(step, by_constraint),
            losses=losses,
            lams={name: c.lam for name, c in self._constraints.items()},
        )
        if not report.finite:
            # The caller skips this step or stops, and λ must not take it in.
            return report
        said = [
            text
            for name, constraint in self._constraints.items()
            for text in constraint.update(by_constraint[name], step)
        ]
        return report.saying(said)


def take_gradients(parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """Move the gradients out of the parameters, without copying them."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients
