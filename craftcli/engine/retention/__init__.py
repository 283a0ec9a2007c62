"""What the student is held to, how it is opened, and the constraint itself.

- `retention`: `Retention`, the constraint that is applied in every training step.
- `turn_losses`: the losses of a turn, on the device until they are read.
- `terms`: what a term is; one module for each kind of term:
  - `imitation`: hidden states, actions and tokens of a cache (modes hidden, action, token_ce),
  - `replay`: the policy's own loss on old data (mode replay),
  - `weight_distance`: the distance from the teacher's weights (modes l2sp, ewc).
- `opening`: opens a cache against a policy, and the terms of a run.
- `anchors`: the rows of a cache as numbered batches.
- `live_anchors`: numbered batches of new anchors, to which a live teacher answers.
- `live_teacher`: that teacher: a copy of the policy, or the student without its LoRA weights.
- `held_out_rows`: which of these rows are not trained on.
- `anchor_dataset`: the dataset that the anchors were taken from.
- `self_check`: L_ret = 0 at the teacher's weights, or the run stops.
- `gradient_reach`: which parameters the retention gradient reaches.
- `own_loop`: adapts to the user's own training loop, for `Retention.open`.
"""

from craftcli.engine.retention.anchor_dataset import AnchorDataset, open_anchor_dataset
from craftcli.engine.retention.anchors import AnchorBatch, AnchorSet, NumberedAnchors
from craftcli.engine.retention.gradient_reach import GradientReach, find_reach
from craftcli.engine.retention.imitation import Imitation
from craftcli.engine.retention.live_anchors import LiveAnchors
from craftcli.engine.retention.live_teacher import LiveTeacher
from craftcli.engine.retention.opening import OpenedAnchors, open_anchors, open_terms
from craftcli.engine.retention.replay import Replay
from craftcli.engine.retention.retention import Retention, open_retention
from craftcli.engine.retention.self_check import SelfCheck, require_self_check
from craftcli.engine.retention.terms import RetentionTerms, Term
from craftcli.engine.retention.weight_distance import WeightDistance

__all__ = [
    "AnchorBatch",
    "AnchorDataset",
    "AnchorSet",
    "GradientReach",
    "Imitation",
    "LiveAnchors",
    "LiveTeacher",
    "NumberedAnchors",
    "OpenedAnchors",
    "Replay",
    "Retention",
    "RetentionTerms",
    "SelfCheck",
    "Term",
    "WeightDistance",
    "find_reach",
    "open_anchor_dataset",
    "open_anchors",
    "open_retention",
    "open_terms",
    "require_self_check",
]
