"""Surgery takes no memory besides the retention gradient; the benchmark prints how much."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import surgery_memory

    return surgery_memory


def test_a_copy_would_be_seen(benchmark: ModuleType) -> None:
    gradient = torch.ones(1000)
    assert benchmark.operation_peak(gradient.clone) >= gradient.nbytes
    assert benchmark.operation_peak(lambda: gradient.clone().clone()) >= 2 * gradient.nbytes
    assert benchmark.operation_peak(lambda: gradient.mul_(2.0)) < gradient.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_no_more_than_a_tenth_of_a_copy_is_added(
    benchmark: ModuleType, dtype: torch.dtype, transposed: bool
) -> None:
    assert benchmark.measure(layers=1, dtype=dtype, transposed=transposed, groups=5) <= 1.1
