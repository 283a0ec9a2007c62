import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from craftcli.choices import Pooling
from craftcli.policies.pooling import (
    Pooled,
    TokenMasks,
    needs_action_tokens,
    pool,
    required_tokens,
)

ROWS, DIM = 3, 5
CAMERA, TEXT, ACTION = 7, 4, 3
SPAN = (2 * CAMERA + TEXT, 2 * CAMERA + TEXT + ACTION)
LENGTH = SPAN[1]

properties = settings(deadline=None, derandomize=True, max_examples=50)
every_pooling = pytest.mark.parametrize("pooling", list(Pooling))


def make_masks(
    cameras: list[list[bool]], texts: list[int], actions: list[int], *, left: bool = False
) -> TokenMasks:
    """Two cameras a row (present or missing), then text, then actions, padded to a fixed length."""
    image, text, action = (torch.zeros(len(texts), LENGTH, dtype=torch.bool) for _ in range(3))
    for row, present in enumerate(cameras):
        for index, there in enumerate(present):
            image[row, index * CAMERA : (index + 1) * CAMERA] = there
        begin = 2 * CAMERA + (TEXT - texts[row] if left else 0)
        text[row, begin : begin + texts[row]] = True
        action[row, SPAN[0] : SPAN[0] + actions[row]] = True
    return TokenMasks(image=image, text=text, action=action, action_span=SPAN)


@st.composite
def masks_strategy(draw: st.DrawFn) -> TokenMasks:
    return make_masks(
        [[draw(st.booleans()), draw(st.booleans())] for _ in range(ROWS)],
        [draw(st.integers(0, TEXT)) for _ in range(ROWS)],
        [draw(st.integers(0, ACTION)) for _ in range(ROWS)],
        left=draw(st.booleans()),
    )


def make_hidden(seed: int = 0, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randn(rows, length, DIM, generator=torch.Generator().manual_seed(seed))


def by_hand(hidden: Tensor, masks: TokenMasks, pooling: Pooling) -> list[list[list[float] | None]]:
    """The definition of every pooling, a token at a time; None where there is nothing to pool."""

    def mean(tokens: list[Tensor]) -> list[float] | None:
        return torch.stack(tokens).double().mean(0).tolist() if tokens else None

    rows: list[list[list[float] | None]] = []
    for states, image, text, action in zip(
        hidden, masks.image, masks.text, masks.action, strict=True
    ):
        images = [s for s, m in zip(states, image, strict=True) if m]
        texts = [s for s, m in zip(states, text, strict=True) if m]
        actions = [s for s, m in zip(states, action, strict=True) if m]
        prefix = images + texts
        rows.append(
            {
                Pooling.MEAN_IMAGE_TOKENS: [mean(images)],
                Pooling.MEAN_MASKED: [mean(prefix)],
                Pooling.LAST_TOKEN: [mean(prefix[-1:])],
                Pooling.CLS_TOKEN: [mean(prefix[:1])],
                Pooling.VISION_TEXT: [mean(images), mean(texts[-1:])],
                Pooling.MEAN_ACTION_TOKENS: [mean(actions)],
                Pooling.ACTION_TOKENS: [
                    states[i].tolist() if action[i] else None for i in range(*SPAN)
                ],
            }[pooling]
        )
    return rows


def assert_same(pooled: Pooled, expected: list[list[list[float] | None]]) -> None:
    assert pooled.mask.tolist() == [[v is not None for v in row] for row in expected]
    target = torch.tensor([[v if v is not None else [0.0] * DIM for v in row] for row in expected])
    torch.testing.assert_close(pooled.vectors, target)


@every_pooling
@properties
@given(masks=masks_strategy(), seed=st.integers(0, 1000))
def test_matches_the_definition(pooling: Pooling, masks: TokenMasks, seed: int) -> None:
    hidden = make_hidden(seed)
    pooled = pool(hidden, masks, pooling)
    assert_same(pooled, by_hand(hidden, masks, pooling))


@every_pooling
@pytest.mark.parametrize("junk", [1e30, math.inf, math.nan])
@properties
@given(masks=masks_strategy())
def test_padding_never_reaches_value_or_gradient(
    pooling: Pooling, junk: float, masks: TokenMasks
) -> None:
    hidden = make_hidden()
    padding = ~(masks.prefix | masks.action)
    dirty = hidden.masked_fill(padding.unsqueeze(-1), junk).requires_grad_()
    pooled = pool(dirty, masks, pooling)
    assert torch.equal(pooled.vectors, pool(hidden, masks, pooling).vectors)
    (gradient,) = torch.autograd.grad(pooled.vectors.square().sum(), dirty)
    assert gradient.isfinite().all()
    assert not gradient[padding].any()


@every_pooling
def test_gradients_are_those_of_the_definition(pooling: Pooling) -> None:
    masks = make_masks([[True, False], [False, False], [True, True]], [4, 0, 2], [3, 0, 1])
    hidden = make_hidden().requires_grad_()
    pooled = pool(hidden, masks, pooling)
    weights = torch.randn(pooled.vectors.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((pooled.vectors * weights).sum(), hidden)
    # Pooling is linear, so a directional difference is exact up to rounding.
    direction = make_hidden(2)
    moved = pool(hidden.detach() + direction, masks, pooling).vectors
    expected = ((moved - pooled.vectors.detach()) * weights).sum()
    torch.testing.assert_close((gradient * direction).sum(), expected, atol=1e-4, rtol=1e-4)
    assert gradient[0].abs().sum() > 0


@every_pooling
def test_nan_in_a_valid_token_is_not_hidden(pooling: Pooling) -> None:
    masks = make_masks([[True, True]], [4], [3])
    assert pool(torch.full((1, LENGTH, DIM), math.nan), masks, pooling).vectors.isnan().all()


def test_one_nan_image_token_poisons_only_its_row() -> None:
    masks = make_masks([[True, False], [True, False]], [2, 2], [0, 0])
    hidden = make_hidden(rows=2)
    hidden[0, 3] = math.nan
    vectors = pool(hidden, masks, Pooling.MEAN_IMAGE_TOKENS).vectors
    assert vectors[0].isnan().all()
    assert vectors[1].isfinite().all()


def test_a_missing_camera_does_not_dilute_the_mean() -> None:
    hidden = torch.zeros(2, LENGTH, DIM)
    hidden[:, :CAMERA] = 1.0
    hidden[:, CAMERA : 2 * CAMERA] = 3.0
    masks = make_masks([[True, False], [True, True]], [1, 1], [0, 0])
    vectors = pool(hidden, masks, Pooling.MEAN_IMAGE_TOKENS).vectors
    assert vectors[:, 0, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("tokens", [1, 64, 256])
def test_the_number_of_image_tokens_is_read_from_the_mask(tokens: int) -> None:
    length = 2 * tokens + 3
    image = torch.arange(length).lt(2 * tokens).unsqueeze(0)
    none = torch.zeros_like(image)
    hidden = make_hidden(rows=1, length=length)
    masks = TokenMasks(image=image, text=~image, action=none)
    pooled = pool(hidden, masks, Pooling.VISION_TEXT)
    torch.testing.assert_close(pooled.vectors[0, 0], hidden[0, : 2 * tokens].mean(0))
    assert torch.equal(pooled.vectors[0, 1], hidden[0, -1])


@pytest.mark.parametrize("left", [False, True])
def test_last_token_is_the_last_text_token(left: bool) -> None:
    """Fault 5: with a mask of the text alone, the index landed on an image token."""
    masks = make_masks([[True, True], [True, False]], [2, 3], [3, 3], left=left)
    hidden = make_hidden(rows=2)
    ends = [LENGTH - ACTION - 1] * 2 if left else [2 * CAMERA + 1, 2 * CAMERA + 2]
    vectors = pool(hidden, masks, Pooling.LAST_TOKEN).vectors
    assert torch.equal(vectors[:, 0], hidden[[0, 1], ends])


@every_pooling
def test_a_row_without_tokens_is_zero_and_masked(pooling: Pooling) -> None:
    masks = make_masks([[False, False], [True, True]], [0, 4], [0, 3])
    pooled = pool(torch.full((2, LENGTH, DIM), 2.0), masks, pooling)
    assert not pooled.mask[0].any()
    assert not pooled.vectors[0].any()
    assert pooled.mask[1].all()


@every_pooling
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(pooling: Pooling, dtype: torch.dtype) -> None:
    masks = make_masks([[True, True]], [4], [3])
    hidden = make_hidden(rows=1).to(dtype)
    vectors = pool(hidden, masks, pooling).vectors
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors, pool(hidden.float(), masks, pooling).vectors)


@every_pooling
def test_a_row_does_not_depend_on_its_batch(pooling: Pooling) -> None:
    masks = make_masks([[True, False], [True, True]], [1, 4], [1, 3])
    hidden = make_hidden(rows=2)
    alone = TokenMasks(
        image=masks.image[:1], text=masks.text[:1], action=masks.action[:1], action_span=SPAN
    )
    together, single = pool(hidden, masks, pooling), pool(hidden[:1], alone, pooling)
    assert torch.equal(together.vectors[:1], single.vectors)
    assert torch.equal(together.mask[:1], single.mask)


def test_required_tokens() -> None:
    assert {p: set(required_tokens(p)) for p in Pooling} == {
        Pooling.MEAN_IMAGE_TOKENS: {"image"},
        Pooling.MEAN_MASKED: set(),
        Pooling.LAST_TOKEN: set(),
        Pooling.CLS_TOKEN: set(),
        Pooling.VISION_TEXT: {"image", "text"},
        Pooling.MEAN_ACTION_TOKENS: {"action"},
        Pooling.ACTION_TOKENS: {"action"},
    }
    assert {p for p in Pooling if needs_action_tokens(p)} == {
        Pooling.MEAN_ACTION_TOKENS,
        Pooling.ACTION_TOKENS,
    }


def test_masks_that_do_not_fit_are_refused() -> None:
    masks = make_masks([[True, True]], [4], [3])
    integers = replace(masks, image=masks.image.int())
    outside = replace(masks, action_span=(0, LENGTH + 1))
    with pytest.raises(ValueError, match="image mask must be bool of shape"):
        pool(make_hidden(rows=1, length=LENGTH + 1), masks, Pooling.LAST_TOKEN)
    with pytest.raises(ValueError, match=r"image mask must be bool .* torch.int32"):
        pool(make_hidden(rows=1), integers, Pooling.LAST_TOKEN)
    with pytest.raises(ValueError, match="action_span"):
        pool(make_hidden(rows=1), outside, Pooling.ACTION_TOKENS)
