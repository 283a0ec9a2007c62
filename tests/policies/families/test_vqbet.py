"""VQ-BeT: tokens sorted by kind, and a mean over the actions that its head would sample."""

from typing import Any

import pytest
import torch
from tiny import vqbet
from tiny.world import CAMERAS, PX, STATE

from craftcli.policies.base import FeatureRequest, PolicyOutput
from craftcli.policies.families.vqbet import VqBetAdapter

ADAPTER = VqBetAdapter()
WANTED = FeatureRequest(stack="gpt", layers=(0, 1), output=True)


def batch(rows: int = 2) -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        CAMERAS[0]: torch.rand(rows, vqbet.OBSERVED, 3, PX, PX),
        "observation.state": torch.randn(rows, vqbet.OBSERVED, STATE),
    }


def sampled(policy: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """A chunk of actions as the policy acts it out."""
    images = torch.stack([inputs[CAMERAS[0]]], dim=-4)
    with torch.no_grad():
        return policy.vqbet({**inputs, "observation.images": images}, rollout=True)


def predicted(policy: Any, inputs: dict[str, Any]) -> PolicyOutput:
    with torch.no_grad():
        output = ADAPTER.features(policy, inputs, WANTED).output
    assert output is not None
    return output


def distinct(policy: Any) -> Any:
    """A head whose codes differ in what they do; a fresh one's are nearly alike."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in policy.vqbet.action_head.named_parameters():
            if name.startswith("map_to") and name.endswith("weight"):
                parameter.normal_(std=0.5)
    return policy.eval()


@pytest.mark.parametrize("sequentially", [False, True])
def test_without_doubt_the_mean_is_what_the_policy_does(sequentially: bool) -> None:
    policy = distinct(vqbet.policy(sequentially_select=sequentially, bet_softmax_temperature=1e-5))
    seen = batch()
    torch.testing.assert_close(predicted(policy, seen).values, sampled(policy, seen))


@pytest.mark.parametrize("sequentially", [False, True])
def test_with_doubt_it_is_the_mean_over_many_samples(sequentially: bool) -> None:
    policy = distinct(vqbet.policy(sequentially_select=sequentially, bet_softmax_temperature=0.5))
    seen = batch(1)
    head = policy.vqbet.action_head
    queries: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda _module, args: queries.append(args[0]))
    sampled(policy, seen)
    handle.remove()
    torch.manual_seed(3)
    with torch.no_grad():
        many = head(queries[0][:, vqbet.OBSERVED - 1 : vqbet.OBSERVED].expand(20_000, -1, -1))
    actions = many["predicted_action"][:, 0].unflatten(1, (vqbet.CHUNK, -1))
    assert actions.std(0).max() > 0.1
    error = actions.mean(0) - predicted(policy, seen).values[0]
    assert (error.abs() < 5 * actions.std(0) / 20_000**0.5 + 1e-5).all()


def test_tokens_are_sorted_by_kind() -> None:
    policy = vqbet.policy().eval()
    with torch.no_grad():
        found = ADAPTER.features(policy, batch(), WANTED)
    steps, queries = vqbet.OBSERVED, vqbet.OBSERVED + vqbet.QUERIES - 1
    kinds = ["image"] * steps + ["text"] * steps + ["action"] * queries
    for kind in ("image", "text", "action"):
        assert getattr(found.masks, kind)[1].tolist() == [each == kind for each in kinds]
    assert found.masks.action_span == (2 * steps, 2 * steps + queries)


def test_gradients_of_the_mean_reach_codes_and_offsets() -> None:
    policy = distinct(vqbet.policy())
    output = ADAPTER.features(policy, batch(), WANTED).output
    assert output is not None
    output.values.square().sum().backward()
    head = policy.vqbet.action_head
    for mapping in (head.map_to_cbet_preds_bin, head.map_to_cbet_preds_offset):
        assert mapping[0].weight.grad.any()
    assert all(parameter.grad is None for parameter in head.vqvae_model.parameters())
