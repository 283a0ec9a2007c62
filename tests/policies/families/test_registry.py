"""What the registry asks of an adapter before it serves a policy."""

from typing import Any, override

import pytest
import torch

from craftcli.policies.base import Batch, FeatureRequest, Features, LayerStack, PolicyAdapter
from craftcli.policies.families.act import ActAdapter
from craftcli.policies.families.registry import ADAPTERS, checked


class OnlyMethods(PolicyAdapter):
    """All abstract methods, and none of the class variables."""

    @override
    def stacks(self, policy: Any) -> dict[str, LayerStack]:
        return {}

    @override
    def input_keys(self, policy: Any, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        return ()

    @override
    def features(self, policy: Any, batch: Batch, request: FeatureRequest) -> Features:
        raise NotImplementedError

    @override
    def compute_dtype(self, policy: Any) -> torch.dtype:
        return torch.float32


def test_an_adapter_without_its_class_variables_is_refused_by_name() -> None:
    missing = (
        "policy_types, stack_names, default_stack, default_layers, default_pooling, token_kinds, "
        "output_kind"
    )
    with pytest.raises(TypeError, match=f"OnlyMethods does not set {missing}; .*base.py"):
        checked(OnlyMethods())


def test_a_complete_adapter_is_served_as_it_is() -> None:
    adapter = ActAdapter()
    assert checked(adapter) is adapter


def test_no_two_adapters_of_craft_serve_the_same_type() -> None:
    types = [name for adapter in ADAPTERS for name in adapter.policy_types]
    assert len(types) == len(set(types))
