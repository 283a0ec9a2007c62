"""Attention masks that craft makes itself, because LeRobot's functions move between versions."""

import torch
from lerobot.policies.common import vla_utils

from craftcli.policies.attention_masks import additive, block_attention


def test_attention_masks_are_lerobots() -> None:
    pad = torch.tensor([[True, True, True, False], [True, True, True, True]])
    starts = torch.tensor([[0, 0, 1, 0], [1, 0, 1, 1]])
    seen = block_attention(pad, starts)
    assert torch.equal(seen, vla_utils.make_att_2d_masks(pad, starts))
    for dtype in (None, torch.bfloat16):
        expected = vla_utils.prepare_attention_masks_4d(seen, dtype)
        assert torch.equal(additive(seen, dtype), expected)
        assert additive(seen, dtype).dtype == expected.dtype
