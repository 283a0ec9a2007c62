"""Defaults of `PolicyAdapter` that families share."""

import pytest

from craftcli.policies.base import PolicyAdapter
from craftcli.policies.families.act import ActAdapter
from craftcli.policies.families.any_policy import GenericAdapter, PathAdapter
from craftcli.policies.families.pi0_fast import Pi0FastAdapter
from craftcli.policies.families.pi05 import Pi05Adapter
from craftcli.policies.families.xvla import XvlaAdapter

VISION_LANGUAGE = (Pi0FastAdapter(), Pi05Adapter(), XvlaAdapter(), GenericAdapter())


@pytest.mark.parametrize("adapter", VISION_LANGUAGE, ids=lambda adapter: type(adapter).__name__)
@pytest.mark.parametrize("runs", [False, True], ids=["itself", "by-path"])
def test_parts_of_a_vision_language_model_are_reported_by_name(
    adapter: PolicyAdapter, runs: bool
) -> None:
    adapter = PathAdapter(adapter) if runs else adapter
    prefix = "model.paligemma_with_expert.paligemma"
    assert adapter.part_of(f"{prefix}.model.vision_tower.embeddings.weight") == "vision_tower"
    assert adapter.part_of(f"{prefix}.model.language_model.layers.0.weight") == "language_model"
    assert adapter.part_of(f"{prefix}.lm_head.weight") == "lm_head"
    assert adapter.part_of("model.action_out_proj.weight") == "model"
    assert adapter.part_of("my_vision_tower_norm.weight") == "my_vision_tower_norm"


def test_other_parameters_go_by_the_first_part_of_their_name() -> None:
    assert ActAdapter().part_of("model.language_model.weight") == "model"
