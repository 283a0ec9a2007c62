import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from craftcli.choices import LossKind
from craftcli.engine.method.losses import layer_loss, retention_loss

VARIANCE = 0.25

properties = settings(deadline=None, derandomize=True, max_examples=50)
every_kind = pytest.mark.parametrize("kind", list(LossKind))


def vectors(seed: int, shape: tuple[int, ...] = (4, 3, 6)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_mask(seed: int = 0) -> Tensor:
    mask = vectors(seed + 100, (4, 3)) > 0
    mask[0, 0], mask[1, 1] = True, False
    return mask


def by_torch(student: Tensor, teacher: Tensor, mask: Tensor, kind: LossKind) -> Tensor:
    """PyTorch's own losses on each row's valid vectors alone, in float64, and their mean."""
    rows = [
        _row_by_torch(a[m].double(), b[m].double(), kind) if m.any() else a.double().sum() * 0
        for a, b, m in zip(student, teacher, mask, strict=True)
    ]
    return torch.stack(rows).mean()


def _row_by_torch(a: Tensor, b: Tensor, kind: LossKind) -> Tensor:
    match kind:
        case LossKind.MSE:
            return functional.mse_loss(a, b)
        case LossKind.NMSE:
            return functional.mse_loss(a, b) / VARIANCE
        case LossKind.L1:
            return functional.l1_loss(a, b)
        case LossKind.COSINE:
            return (1 - functional.cosine_similarity(a, b, dim=-1)).mean()


@every_kind
@properties
@given(seed=st.integers(0, 1000), scale=st.sampled_from([1e-2, 1.0, 1e3]))
def test_matches_pytorch_in_value_and_gradient(kind: LossKind, seed: int, scale: float) -> None:
    mask, teacher = some_mask(seed), vectors(seed + 1) * scale
    student = (vectors(seed) * scale).requires_grad_()
    loss = layer_loss(student, teacher, mask, kind, VARIANCE)
    expected = by_torch(student, teacher, mask, kind)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float())
    (gradient,) = torch.autograd.grad(loss, student)
    (expected_gradient,) = torch.autograd.grad(expected, student)
    size = expected_gradient.abs().max().item()
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6 * size)


@every_kind
@properties
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_is_zero_at_equal_inputs(
    kind: LossKind, seed: int, scale: float, dtype: torch.dtype
) -> None:
    student = (vectors(seed) * scale).to(dtype)
    loss = layer_loss(student, student.clone(), some_mask(seed), kind, VARIANCE).item()
    assert loss == pytest.approx(0.0, abs=1e-6 if kind is LossKind.COSINE else 0.0)


def test_half_precision_is_widened_before_subtracting() -> None:
    teacher = torch.full((1, 1, 4), 256.0, dtype=torch.bfloat16)
    student = torch.full((1, 1, 4), 1.0078125, dtype=torch.bfloat16)
    loss = layer_loss(student, teacher, torch.ones(1, 1, dtype=torch.bool), LossKind.L1, None)
    assert loss.dtype == torch.float32
    # bfloat16 has no number between 254 and 255.
    assert loss.item() == 254.9921875


@every_kind
@pytest.mark.parametrize("junk", [1e30, math.inf, math.nan])
def test_padding_never_reaches_value_or_gradient(kind: LossKind, junk: float) -> None:
    mask, student, teacher = some_mask(), vectors(0), vectors(1)
    clean = layer_loss(student, teacher, mask, kind, VARIANCE)
    dirty = student.masked_fill(~mask.unsqueeze(-1), junk).requires_grad_()
    loss = layer_loss(dirty, teacher.masked_fill(~mask.unsqueeze(-1), junk), mask, kind, VARIANCE)
    assert torch.equal(loss, clean)
    (gradient,) = torch.autograd.grad(loss, dirty)
    assert gradient.isfinite().all()
    assert not gradient[~mask].any()


@every_kind
def test_nan_in_a_valid_vector_is_not_hidden(kind: LossKind) -> None:
    student = vectors(0)
    student[0, 0, 0] = math.nan
    assert layer_loss(student, vectors(1), some_mask(), kind, VARIANCE).isnan()


@every_kind
def test_without_valid_vectors_the_loss_is_zero_and_differentiable(kind: LossKind) -> None:
    student = vectors(0).requires_grad_()
    none = torch.zeros(4, 3, dtype=torch.bool)
    loss = layer_loss(student, vectors(1), none, kind, VARIANCE)
    assert loss.item() == 0.0
    (gradient,) = torch.autograd.grad(loss, student)
    assert not gradient.any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("student_scale", "teacher_scale"), [(0, 1), (1, 0), (0, 0)])
def test_cosine_of_zero_vectors_has_a_finite_gradient(
    student_scale: int, teacher_scale: int
) -> None:
    student = (vectors(0) * student_scale).requires_grad_()
    loss = layer_loss(student, vectors(1) * teacher_scale, some_mask(), LossKind.COSINE, None)
    (gradient,) = torch.autograd.grad(loss, student)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_nmse_of_the_mean_teacher_is_one() -> None:
    """A student that answers the mean everywhere has drifted by the whole variance."""
    teacher = vectors(0, (512, 1, 16)) * 3 + 5
    variance = teacher.var(dim=0, correction=0).mean().item()
    student = teacher.mean(dim=0, keepdim=True).expand_as(teacher)
    mask = torch.ones(512, 1, dtype=torch.bool)
    loss = layer_loss(student, teacher, mask, LossKind.NMSE, variance)
    assert loss.item() == pytest.approx(1.0, rel=1e-5)


def test_nmse_takes_each_row_as_a_share_of_its_own_variance() -> None:
    student, teacher, mask = vectors(0), vectors(1), some_mask()
    own = torch.arange(1.0, len(student) + 1)
    alone = [
        layer_loss(student[n : n + 1], teacher[n : n + 1], mask[n : n + 1], LossKind.NMSE, n + 1.0)
        for n in range(len(student))
    ]
    loss = layer_loss(student, teacher, mask, LossKind.NMSE, own)
    assert loss.item() == pytest.approx(torch.stack(alone).mean().item(), rel=1e-6)
    with pytest.raises(ValueError, match="a variance for each of"):
        layer_loss(student, teacher, mask, LossKind.NMSE, own[:1])


@every_kind
def test_weighted_rows_count_by_their_weights(kind: LossKind) -> None:
    a, b, mask = vectors(1), vectors(2), some_mask()
    weights = torch.tensor([0.0, 0.5, 1.0, 2.5])
    found = layer_loss(a, b, mask, kind, VARIANCE, weights)
    rows = torch.stack(
        [layer_loss(a[n : n + 1], b[n : n + 1], mask[n : n + 1], kind, VARIANCE) for n in range(4)]
    )
    torch.testing.assert_close(found, (weights * rows).mean())


@pytest.mark.parametrize("variance", [None, 0.0, -1.0, math.nan, math.inf])
def test_nmse_refuses_a_variance_that_is_not_positive(variance: float | None) -> None:
    with pytest.raises(ValueError, match="positive teacher variance"):
        layer_loss(vectors(0), vectors(1), some_mask(), LossKind.NMSE, variance)


@pytest.mark.parametrize("shape", [(4, 3, 1), (4, 1, 6), (1, 3, 6)])
def test_shapes_are_not_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shapes do not match"):
        layer_loss(vectors(0), vectors(1, shape), some_mask(), LossKind.MSE, None)
    with pytest.raises(ValueError, match="shapes do not match"):
        layer_loss(vectors(0), vectors(1), some_mask()[:, :1], LossKind.MSE, None)


@every_kind
def test_retention_loss_is_the_mean_over_layers(kind: LossKind) -> None:
    student = {"a": vectors(0).requires_grad_(), "b": vectors(1).requires_grad_()}
    teacher = {"b": vectors(2), "a": vectors(3)}
    variances = {"a": 0.5, "b": 2.0}
    mask = some_mask()
    loss = retention_loss(student, teacher, mask, kind, variances)
    for name in student:
        alone = layer_loss(student[name], teacher[name], mask, kind, variances[name])
        assert torch.equal(loss.per_layer[name], alone.detach())
        assert not loss.per_layer[name].requires_grad
    torch.testing.assert_close(loss.total, (loss.per_layer["a"] + loss.per_layer["b"]) / 2)
    gradients = torch.autograd.grad(loss.total, list(student.values()))
    assert all(gradient.any() for gradient in gradients)


def test_layers_have_to_match() -> None:
    a, mask = {"a": vectors(0)}, some_mask()
    with pytest.raises(ValueError, match="layers differ"):
        retention_loss(a, {"b": vectors(0)}, mask, LossKind.MSE, {})
    with pytest.raises(ValueError, match="layers differ"):
        retention_loss(a, {"a": vectors(0), "b": vectors(0)}, mask, LossKind.MSE, {})
    with pytest.raises(ValueError, match="layers differ"):
        retention_loss({}, {}, mask, LossKind.MSE, {})
    with pytest.raises(ValueError, match="variances"):
        retention_loss(a, a, mask, LossKind.NMSE, {})
