"""The mathematics of the method: tensors and numbers in, tensors and numbers out; no files.

- `losses`: L_ret, the distance of the student's vectors or tokens from the teacher's.
- `gradients`: inner products and weighted sums of the two gradients.
- `projection`: the projection rule and the merge of the two gradients.
- `torchjd_weights`: TorchJD's weights, as an alternative to projection.
- `parameter_groups`: which parameters share one projection decision.
- `budget`: ε(t), from a schedule or found in the run.
- `held_out`: the constraint on anchors that are not trained on.
- `multiplier`: λ, by dual ascent or νPI.
- `constraint`: budget and multiplier together, with warnings.
"""

from craftcli.engine.method.budget import AutoEpsilon, Budget, epsilon_at, warmed_up
from craftcli.engine.method.constraint import Constraint, LambdaWatch, Note
from craftcli.engine.method.gradients import Products, Weights, inner_products, weighted_sum_
from craftcli.engine.method.held_out import HeldOut
from craftcli.engine.method.losses import (
    RetentionLoss,
    layer_loss,
    retention_loss,
    token_cross_entropy,
    top_k_divergence,
)
from craftcli.engine.method.multiplier import Multiplier
from craftcli.engine.method.parameter_groups import layer_groups, optimizer_groups
from craftcli.engine.method.projection import (
    ProjectionReport,
    merge_weights,
    project_and_merge_,
    projection_coefficient,
)

__all__ = [
    "AutoEpsilon",
    "Budget",
    "Constraint",
    "HeldOut",
    "LambdaWatch",
    "Multiplier",
    "Note",
    "Products",
    "ProjectionReport",
    "RetentionLoss",
    "Weights",
    "epsilon_at",
    "inner_products",
    "layer_groups",
    "layer_loss",
    "merge_weights",
    "optimizer_groups",
    "project_and_merge_",
    "projection_coefficient",
    "retention_loss",
    "token_cross_entropy",
    "top_k_divergence",
    "warmed_up",
    "weighted_sum_",
]
