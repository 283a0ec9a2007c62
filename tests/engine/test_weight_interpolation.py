"""Between two sets of weights: the ends to the bit, the middle the mean, groups apart."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from craftcli.engine.weight_interpolation import (
    Group,
    choose_alphas,
    interpolate,
    interpolate_weights,
    require_same_architecture,
)
from craftcli.errors import EXIT_USAGE, CraftError


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(3, 2, generator=generator).to(dtype)
        for name in ("vision.layers.0.weight", "vision.layers.1.weight", "head.weight")
    }


def merged(
    teacher: dict[str, Tensor], student: dict[str, Tensor], alpha: float, *groups: Group
) -> dict[str, Tensor]:
    return interpolate_weights(
        teacher,
        student,
        choose_alphas(student, alpha, groups),
        {name: tensor.dtype for name, tensor in student.items()},
        lambda _: None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_ends_are_the_policies_themselves(dtype: torch.dtype) -> None:
    teacher, student = weights(0, dtype), weights(1, dtype)
    teacher["head.weight"][0] = torch.tensor([-0.0, float("inf")], dtype=dtype)
    for alpha, end in ((0.0, teacher), (1.0, student)):
        result = merged(teacher, student, alpha)
        for name, tensor in end.items():
            assert result[name].dtype == dtype
            assert (
                result[name].numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes()
                if dtype != torch.bfloat16
                else torch.equal(result[name], tensor)
            )


@given(alpha=st.floats(0, 1), seed=st.integers(0, 99))
def test_what_lies_between_is_on_the_line(alpha: float, seed: int) -> None:
    teacher, student = weights(seed), weights(seed + 1)
    for name, tensor in merged(teacher, student, alpha).items():
        line = teacher[name].double() + alpha * (student[name].double() - teacher[name].double())
        assert torch.allclose(tensor.double(), line, atol=1e-6)


def test_low_precision_is_averaged_in_float32() -> None:
    teacher = torch.tensor([1.0, 3e4], dtype=torch.float16)
    student = torch.tensor([1.0, -6e4], dtype=torch.float16)
    # In float16 the difference would overflow.
    assert interpolate(teacher, student, 0.5).tolist() == [1.0, -15000.0]


def test_what_is_no_float_is_the_students() -> None:
    teacher, student = {"steps": torch.tensor(3)}, {"steps": torch.tensor(7)}
    for alpha in (0.0, 0.5, 1.0):
        assert merged(teacher, student, alpha)["steps"] == 7


def test_groups_go_their_own_way_and_the_last_decides() -> None:
    names = weights(0)
    groups = [Group(pattern="vision", alpha=0), Group(pattern="*.1.weight", alpha=0.9)]
    assert choose_alphas(names, 0.5, groups) == {
        "vision.layers.0.weight": 0,
        "vision.layers.1.weight": 0.9,
        "head.weight": 0.5,
    }
    assert choose_alphas(names, 0.5, groups[::-1])["vision.layers.1.weight"] == 0
    assert choose_alphas(names, 0.5, [Group(pattern="layers.0", alpha=1)]) == {
        "vision.layers.0.weight": 1,
        "vision.layers.1.weight": 0.5,
        "head.weight": 0.5,
    }


@pytest.mark.parametrize("pattern", ["visio", "layer", "head.weight.more", "*nothing*", ""])
def test_a_group_of_nothing_lists_what_there_is(pattern: str) -> None:
    with pytest.raises(CraftError, match=r"vision, layers, head;.*vision\.layers\.0\.weight") as e:
        choose_alphas(weights(0), 0.5, [Group(pattern=pattern, alpha=0)])
    assert e.value.exit_code == EXIT_USAGE


def test_tied_tensors_go_together_and_stay_tied() -> None:
    teacher, student = weights(0), weights(1)
    student["tail.weight"], teacher["tail.weight"] = student["head.weight"], teacher["head.weight"]
    result = merged(teacher, student, 0.5, Group(pattern="head", alpha=0.25))
    assert result["tail.weight"] is result["head.weight"]
    expected = torch.lerp(teacher["head.weight"], student["head.weight"], 0.25)
    assert torch.equal(result["tail.weight"], expected)


def test_other_architectures_are_refused_by_name() -> None:
    teacher, student = weights(0), weights(1)
    require_same_architecture(teacher, student)
    student["extra.weight"] = torch.zeros(2)
    teacher["head.weight"] = torch.zeros(4, 2)
    with pytest.raises(
        CraftError,
        match=r"2 of their tensors differ: head\.weight is 4x2 in the teacher and 3x2 in the "
        r"student; extra\.weight is missing in the teacher and 2 in the student",
    ):
        require_same_architecture(teacher, student)
