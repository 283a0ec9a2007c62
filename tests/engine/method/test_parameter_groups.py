import pytest
import torch
from torch import nn

from craftcli.engine.method.parameter_groups import layer_groups, optimizer_groups


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.norm.weight"),
        ("model.layers.3.mlp.0.weight", "model.layers.3.mlp.2.weight"),
        ("layers.3.q_proj.lora_A.default.weight", "layers.3.q_proj.lora_B.default.weight"),
        ("tower.blocks.0.layers.1.fc.bias", "tower.blocks.0.layers.1.fc.weight"),
        ("0.weight", "0.bias"),
        ("head.2.weight", "head.2.bias"),
        ("model.embed.weight", "model.embed.bias"),
        ("queries.0", "queries.1"),
        ("scale", "shift"),
    ],
)
def test_one_layer_is_one_group(name: str, same: str) -> None:
    assert layer_groups([name, same]) == [0, 0]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("model.layers.3.norm.weight", "model.layers.13.norm.weight"),
        ("vision.layers.3.norm.weight", "text.layers.3.norm.weight"),
        ("tower.blocks.0.layers.1.fc.bias", "tower.blocks.1.layers.1.fc.bias"),
        ("head.0.weight", "head.2.weight"),
        ("0.weight", "1.weight"),
        ("model.embed.weight", "model.head.weight"),
        ("scale", "head.scale"),
    ],
)
def test_another_layer_is_another_group(name: str, other: str) -> None:
    assert layer_groups([name, other]) == [0, 1]


def test_numbers_run_from_0_by_first_appearance() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 1, 16), num_layers=3, enable_nested_tensor=False
    )
    groups = layer_groups([name for name, _ in model.named_parameters()])
    assert groups == sorted(groups)
    assert set(groups) == {0, 1, 2}
    assert layer_groups([]) == []


def test_optimizer_groups() -> None:
    a, b, c, d = (nn.Parameter(torch.zeros(1)) for _ in range(4))
    optimizer = torch.optim.SGD([{"params": [b]}, {"params": [a, c]}], lr=0.1)
    assert optimizer_groups([a, b, c], optimizer.param_groups) == [0, 1, 0]
    assert optimizer_groups([a, b, d, c, d], optimizer.param_groups) == [0, 1, 2, 0, 2]
