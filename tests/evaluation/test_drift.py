"""Drift from the teacher: none at its own weights, some when weights move."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import LossKind
from craftcli.errors import CraftError
from craftcli.evaluation.action_error import compare_actions
from craftcli.evaluation.drift import LinearCka, cache_digest, measure_drift
from craftcli.evaluation.results import Drift
from craftcli.sources import open_teacher


def nudge(student: Any, size: float = 0.02) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.policy.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return student


def test_the_teacher_has_not_moved(teacher: Any, cache: Path) -> None:
    rows: list[int] = []
    drift = measure_drift(teacher, CacheReader.open(cache), batch_size=10, on_rows=rows.append)
    assert sum(rows) == drift.rows == 32
    assert drift.l_ret["hidden"] < 1e-6
    assert all(layer.nmse < 1e-6 for layer in drift.layers)
    assert all(layer.cka == pytest.approx(1, abs=1e-6) for layer in drift.layers)
    assert Drift.from_json(drift.to_json()) == drift


def test_what_moved_is_measured_alike_in_any_batches(student: Any, cache: Path) -> None:
    nudge(student)
    reader = CacheReader.open(cache)
    drift = measure_drift(student, reader, loss=LossKind.COSINE, batch_size=32)
    pieces = measure_drift(student, reader, loss=LossKind.COSINE, batch_size=7)
    for layer, piece in zip(drift.layers, pieces.layers, strict=True):
        assert layer.nmse > 1e-3
        assert layer.cka < 1
        assert piece.nmse == pytest.approx(layer.nmse, rel=1e-4)
        assert piece.cka == pytest.approx(layer.cka, rel=1e-4)
    # `loss` applies to l_ret; the layers are always in nmse.
    assert drift.l_ret["hidden"] < drift.layers[0].nmse


def test_anchors_of_the_run_are_told_from_held_out_ones(
    teacher: Any, cache: Path, build: Callable[..., Path], tmp_path: Path
) -> None:
    trained_on = CacheReader.open(cache)
    held_out = CacheReader.open(
        build(tmp_path / "held_out.zarr", samples=16, seed=1, exclude=cache)
    )
    assert measure_drift(teacher, held_out, trained_on=trained_on).shared_rows == 0
    assert measure_drift(teacher, trained_on, trained_on=trained_on).shared_rows == 32
    assert cache_digest(trained_on.manifest) != cache_digest(held_out.manifest)


def test_too_few_frames_are_left_over(
    build: Callable[..., Path], cache: Path, old_data: Any, tmp_path: Path
) -> None:
    with pytest.raises(CraftError, match="without those of"):
        build(tmp_path / "more.zarr", samples=len(old_data) - 31, exclude=cache)


def test_tokens_are_compared_where_the_cache_has_them(
    teacher: Any, student: Any, build: Callable[..., Path], tmp_path: Path
) -> None:
    both = CacheReader.open(build(tmp_path / "both.zarr", samples=8, kind="hidden+action"))
    at_rest = measure_drift(teacher, both).action
    moved = measure_drift(nudge(student, 0.1), both).action
    assert at_rest is not None
    assert moved is not None
    assert at_rest.kind == moved.kind == "kl"
    assert at_rest.value == pytest.approx(0, abs=1e-5)
    assert moved.value > 1e-3


def test_actions_are_compared_with_the_teachers_own(student: Any, cache: Path) -> None:
    reader = CacheReader.open(cache)
    teacher = open_teacher(reader.manifest, device="cpu")
    at_rest = compare_actions(student, teacher, reader, seed=0, batch_size=16)
    assert at_rest.kind == "chunk_nmse"
    assert at_rest.value == 0
    moved = compare_actions(nudge(student, 0.1), teacher, reader, seed=0, batch_size=16)
    assert moved.value > 0.01
    assert moved.rows == 32


def alignment(ours: Tensor, theirs: Tensor, *, pieces: int = 1) -> float:
    cka = LinearCka()
    for a, b in zip(ours.chunk(pieces), theirs.chunk(pieces), strict=True):
        cka.update(a, b)
    return cka.value


@pytest.fixture
def states() -> Tensor:
    return torch.randn(200, 8, generator=torch.Generator().manual_seed(0)) + 3


def test_rotation_scale_and_shift_change_nothing(states: Tensor) -> None:
    turn, _ = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    assert alignment(2.5 * states @ turn - 7, states) == pytest.approx(1, abs=1e-5)


def test_unrelated_states_are_not_aligned(states: Tensor) -> None:
    other = torch.randn(200, 8, generator=torch.Generator().manual_seed(2))
    assert alignment(other, states) < 0.2


def test_pieces_add_up_to_the_definition(states: Tensor) -> None:
    other = states.tanh() + 0.3 * torch.randn(200, 8, generator=torch.Generator().manual_seed(3))
    x, y = (v.double() - v.double().mean(0) for v in (other, states))
    expected = (y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())
    assert alignment(other, states, pieces=7) == pytest.approx(expected.item(), rel=1e-9)


def test_states_that_do_not_vary_align_with_nothing(states: Tensor) -> None:
    assert alignment(torch.ones(200, 8), states) == 0
