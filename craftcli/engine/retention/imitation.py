"""Modes hidden, action and token_ce: the student compared with its teacher's answers."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from craftcli.cache.format import (
    LABELS,
    OUTPUT_MASK,
    PREDICTION,
    TOP_LOGPROBS,
    TOP_TOKENS,
    layer_names,
)
from craftcli.cache.requests import feature_request
from craftcli.choices import Kind, LossKind, Mode, Pooling
from craftcli.engine.method.losses import (
    RetentionLoss,
    layer_loss,
    retention_loss,
    token_cross_entropy,
    top_k_divergence,
)
from craftcli.engine.retention.anchors import AnchorBatch, NumberedAnchors
from craftcli.engine.retention.terms import evaluation_mode
from craftcli.policies.base import Features, Policy, PolicyAdapter, PolicyOutput
from craftcli.policies.pooling import pool

PROBE_ROWS = 1
"""Anchors that show what a gradient reaches; in evaluation mode one is enough."""


class Imitation:
    """Compares the student with its teacher; one forward pass serves all of its modes."""

    def __init__(
        self,
        modes: Sequence[Mode],
        anchors: NumberedAnchors,
        policy: Policy,
        adapter: PolicyAdapter,
        *,
        loss: LossKind,
        stride: int = 1,
        weighs_rows: bool = True,
    ) -> None:
        """`weighs_rows` counts rows by `PolicyAdapter.row_weights`, and all alike otherwise."""
        self.modes = tuple(modes)
        self.anchors = anchors
        self.loss = loss
        self._policy = policy
        self._adapter = adapter
        self._stride = stride
        self._weighs_rows = weighs_rows
        self._request = feature_request(anchors.manifest, [Kind(mode) for mode in self.modes])

    def losses(self, number: int, *, loss: LossKind | None = None) -> dict[Mode, RetentionLoss]:
        """The loss of each mode on the anchor batch with this number, with gradients."""
        device = next(self._policy.parameters()).device
        batch = self.anchors.batch(number, device, following=self._stride)
        return self.compare(self.features(batch), batch, loss or self.loss)

    def held_out_losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The loss of each mode on a numbered batch of held-out anchors."""
        batch = self.anchors.held_out_batch(number, next(self._policy.parameters()).device)
        return self.compare(self.features(batch), batch, self.loss)

    def compare(
        self, features: Features, batch: AnchorBatch, kind: LossKind, *, weighted: bool = True
    ) -> dict[Mode, RetentionLoss]:
        """The loss of each mode, from the student's features on a batch.

        `weighted` is False where all rows count alike, whatever the run's own loss does.
        """
        weights = None
        if weighted and self._weighs_rows:
            weights = self._adapter.row_weights(self._policy, batch.inputs)
        found = {}
        if Mode.HIDDEN in self.modes:
            found[Mode.HIDDEN] = self._hidden(features, batch, kind, weights)
        if features.output is not None:
            if Mode.ACTION in self.modes:
                action = self._action(features.output, batch, kind, weights)
                found[Mode.ACTION] = RetentionLoss(action, {})
            if Mode.TOKEN_CE in self.modes:
                tokens = token_cross_entropy(features.output.values, batch.outputs[LABELS])
                found[Mode.TOKEN_CE] = RetentionLoss(tokens, {})
        return found

    def probes(self) -> dict[Mode, Tensor]:
        """For each mode a scalar that depends on all it compares: its sum with random weights.

        Its gradient is not 0 at the teacher's weights, where the loss and its gradient are.
        """
        batch = self.anchors.batch(0, next(self._policy.parameters()).device)
        features = self.features(batch.first(PROBE_ROWS))
        found = {}
        if Mode.HIDDEN in self.modes:
            found[Mode.HIDDEN] = _random_sum(self.states(features).values())
        if features.output is not None:
            output = _random_sum([features.output.values.float()])
            found |= {mode: output for mode in self.modes if mode is not Mode.HIDDEN}
        return found

    def features(self, batch: AnchorBatch) -> Features:
        """Run the student in the way the teacher was run.

        In evaluation mode, because dropout alone would look like drift, but with gradients.
        """
        with evaluation_mode(self._policy):
            return self._adapter.features(self._policy, dict(batch.inputs), self._request)

    def states(self, features: Features) -> dict[str, Tensor]:
        """The student's hidden states by layer name, pooled as the teacher's were."""
        manifest = self.anchors.manifest
        pooling = Pooling(manifest.pooling)
        return {
            name: pool(features.hidden[layer], features.masks, pooling).vectors
            for name, layer in zip(layer_names(manifest), manifest.layers, strict=True)
        }

    def _hidden(
        self, features: Features, batch: AnchorBatch, kind: LossKind, weights: Tensor | None
    ) -> RetentionLoss:
        if batch.mask is None:
            raise RuntimeError("the anchors were opened without hidden states")
        variances = {layer: batch.variances[layer] for layer in batch.targets}
        return retention_loss(
            self.states(features), batch.targets, batch.mask, kind, variances, weights
        )

    def _action(
        self, output: PolicyOutput, batch: AnchorBatch, kind: LossKind, weights: Tensor | None
    ) -> Tensor:
        theirs, mask = batch.outputs, batch.outputs[OUTPUT_MASK]
        if PREDICTION in theirs:
            variance = batch.variances[PREDICTION]
            return layer_loss(output.values, theirs[PREDICTION], mask, kind, variance, weights)
        return top_k_divergence(output.values, theirs[TOP_TOKENS], theirs[TOP_LOGPROBS], mask)


def _random_sum(values: Iterable[Tensor]) -> Tensor:
    """The sum of all numbers, each with an arbitrary weight."""
    arbitrary = torch.Generator().manual_seed(0)
    sums = [(v * torch.randn(v.shape, generator=arbitrary).to(v.device)).sum() for v in values]
    return torch.stack(sums).sum()
