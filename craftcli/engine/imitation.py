"""Holding the student to what the teacher computed on anchors: hidden states, actions, tokens."""

from collections.abc import Sequence

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
from craftcli.cache.pooling import needs_action_tokens, pool
from craftcli.choices import Layout, LossKind, Mode, Pooling
from craftcli.engine.anchors import AnchorBatch, AnchorSet
from craftcli.engine.losses import RetentionLoss, layer_loss, retention_loss
from craftcli.engine.terms import evaluation_mode
from craftcli.engine.token_losses import token_cross_entropy, top_k_divergence
from craftcli.policies.base import Features, Output, Policy, PolicyAdapter, Wanted


class Imitation:
    """The modes that compare with a cache; one forward pass of the student serves all of them."""

    def __init__(
        self,
        modes: Sequence[Mode],
        anchors: AnchorSet,
        policy: Policy,
        adapter: PolicyAdapter,
        *,
        loss: LossKind,
        stride: int = 1,
    ) -> None:
        self.modes = tuple(modes)
        self.anchors = anchors
        self.loss = loss
        self._policy = policy
        self._adapter = adapter
        self._stride = stride
        manifest = anchors.manifest
        hidden = Mode.HIDDEN in self.modes
        self._wanted = Wanted(
            stack=manifest.stack,
            layers=manifest.layers if hidden else (),
            with_actions=hidden and needs_action_tokens(Pooling(manifest.pooling)),
            output=Mode.ACTION in self.modes or Mode.TOKEN_CE in self.modes,
            layout=Layout(manifest.layout) if manifest.layout else None,
        )

    def losses(self, number: int, *, loss: LossKind | None = None) -> dict[Mode, RetentionLoss]:
        """The loss of each mode on the anchor batch of that number, with gradients."""
        device = next(self._policy.parameters()).device
        batch = self.anchors.batch(number, device, following=self._stride)
        return self.compare(self.features(batch), batch, loss or self.loss)

    def compare(
        self, features: Features, batch: AnchorBatch, kind: LossKind
    ) -> dict[Mode, RetentionLoss]:
        """The loss of each mode where the student gave these features on that batch."""
        found = {}
        if Mode.HIDDEN in self.modes:
            found[Mode.HIDDEN] = self._hidden(features, batch, kind)
        if features.output is not None:
            if Mode.ACTION in self.modes:
                action = self._action(features.output, batch, kind)
                found[Mode.ACTION] = RetentionLoss(action, {})
            if Mode.TOKEN_CE in self.modes:
                tokens = token_cross_entropy(features.output.values, batch.outputs[LABELS])
                found[Mode.TOKEN_CE] = RetentionLoss(tokens, {})
        return found

    def probe(self, mode: Mode) -> Tensor:
        """A number that depends on all that a mode compares, with a gradient that is not 0.

        At the teacher's weights the losses and their gradients are 0.
        """
        features = self.features(self.anchors.batch(0, next(self._policy.parameters()).device))
        arbitrary = torch.Generator().manual_seed(0)
        compared = list(self.states(features).values()) if mode is Mode.HIDDEN else []
        if mode is not Mode.HIDDEN and features.output is not None:
            compared.append(features.output.values.float())
        sums = [
            (values * torch.randn(values.shape, generator=arbitrary).to(values.device)).sum()
            for values in compared
        ]
        return torch.stack(sums).sum()

    def features(self, batch: AnchorBatch) -> Features:
        """Run the student as the teacher was run.

        In evaluation mode, because dropout alone would read as drift, but with gradients.
        """
        with evaluation_mode(self._policy):
            return self._adapter.features(self._policy, dict(batch.inputs), self._wanted)

    def states(self, features: Features) -> dict[str, Tensor]:
        """The student's hidden states by layer name, pooled as the teacher's were."""
        manifest = self.anchors.manifest
        pooling = Pooling(manifest.pooling)
        return {
            name: pool(features.hidden[layer], features.masks, pooling).vectors
            for name, layer in zip(layer_names(manifest), manifest.layers, strict=True)
        }

    def _hidden(self, features: Features, batch: AnchorBatch, kind: LossKind) -> RetentionLoss:
        if batch.mask is None:
            raise RuntimeError("the anchors were opened without hidden states")
        variances = {layer: self.anchors.variances[layer] for layer in batch.targets}
        return retention_loss(self.states(features), batch.targets, batch.mask, kind, variances)

    def _action(self, output: Output, batch: AnchorBatch, kind: LossKind) -> Tensor:
        theirs, mask = batch.outputs, batch.outputs[OUTPUT_MASK]
        if PREDICTION in theirs:
            variance = self.anchors.variances[PREDICTION]
            return layer_loss(output.values, theirs[PREDICTION], mask, kind, variance)
        return top_k_divergence(output.values, theirs[TOP_TOKENS], theirs[TOP_LOGPROBS], mask)
