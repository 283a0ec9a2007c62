"""The forward pass that fills a cache, and the one that is compared with it: one request for both.

The retention loss is zero at the teacher's weights only if teacher and student run the same way.
"""

from collections.abc import Collection
from typing import Protocol

from craftcli.choices import Kind, Layout, Pooling
from craftcli.policies.base import FeatureRequest
from craftcli.policies.pooling import needs_action_tokens


class CachedFeatures(Protocol):
    """What a cache holds of its teacher: a manifest, or the recipe of a build."""

    @property
    def stack(self) -> str:
        """Name or path of the stack."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices from 0; empty without hidden states."""
        ...

    @property
    def pooling(self) -> str:
        """A value of `Pooling`."""
        ...

    @property
    def layout(self) -> str | None:
        """A value of `Layout`; None if the stack is named by its family's name."""
        ...


def feature_request(cached: CachedFeatures, kinds: Collection[Kind]) -> FeatureRequest:
    """What a forward pass must return for these kinds of a cache's content."""
    hidden = Kind.HIDDEN in kinds
    return FeatureRequest(
        stack=cached.stack,
        layers=cached.layers if hidden else (),
        with_actions=hidden and needs_action_tokens(Pooling(cached.pooling)),
        output=Kind.ACTION in kinds or Kind.TOKEN_CE in kinds,
        layout=Layout(cached.layout) if cached.layout else None,
    )
