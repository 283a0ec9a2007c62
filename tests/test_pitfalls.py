"""The known faults of the public prototypes; a test rules out each of them.

The numbers are those of our list: 1 threshold, 2 merge, 3 image tokens, 4 layer index, 5 masks,
6 other forward pass (engine/retention/test_retention.py: the loss is zero for every pooling),
7 swallowed cache, 9 logging interval (engine/test_metrics.py), 11 small anchor set, 14 more anchors
than frames, 17 hidden NaN, 18 skipped tests. Here is the shortest proof of each on the real policy;
the tests of the modules go deeper.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Merge, Pooling
from craftcli.engine.method.projection import project_and_merge_
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.policies.base import FeatureRequest
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.pooling import pool


def project_and_merge(task: list[Any], ret: list[Any], **settings: Any) -> Any:
    return project_and_merge_(
        task,
        ret,
        **{
            "threshold": -0.1,
            "project": True,
            "merge": Merge.WEIGHTED,
            "lam": 1.0,
            **settings,
        },
    )


@pytest.mark.parametrize(("size", "angle", "projected"), [(1e-4, 2.9, True), (1e4, 1.573, False)])
def test_01_the_threshold_is_a_cosine(size: float, angle: float, projected: bool) -> None:
    task = [torch.tensor([size, 0.0])]
    ret = [size * torch.tensor([np.cos(angle), np.sin(angle)]).float()]
    assert project_and_merge(task, ret)[1].conflict is projected


def test_02_no_gradient_is_dropped_and_equal_halves_all() -> None:
    task = [torch.tensor([2.0]), None, torch.tensor([4.0])]
    ret = [None, torch.tensor([6.0]), torch.tensor([8.0])]
    merged, _ = project_and_merge(task, ret, merge=Merge.EQUAL)
    assert [g.item() for g in merged] == [1.0, 3.0, 6.0]


def test_03_image_tokens_are_the_policys_own_number(teacher: Any, old_data: Any) -> None:
    batch = teacher.preprocess(read_rows(old_data, [0]))
    masks = teacher.adapter.features(
        teacher.policy, batch, FeatureRequest(stack="vlm", layers=(0,))
    ).masks
    embedded = teacher.policy.model.paligemma_with_expert.embed_image(
        batch["observation.images.top"] * 2 - 1
    )
    assert masks.image.sum().item() == embedded.shape[1] == 9


@pytest.mark.parametrize("layers", ["1,3", "-3,-1", "1,-1"])
def test_04_builder_and_student_count_layers_alike(
    teacher: Any, build: Callable[..., Path], tmp_path: Path, layers: str
) -> None:
    reader = CacheReader.open(build(tmp_path / "a.zarr", layers=layers, samples=8))
    anchors = AnchorSet(reader, batch_size=8, seed=0)
    assert anchors.manifest.layers == (1, 3)
    rows = anchors.read(np.arange(8), torch.device("cpu"))
    with torch.no_grad():
        seen = teacher.adapter.features(
            teacher.policy,
            rows.inputs,
            FeatureRequest(stack="vlm", layers=(1, 3), with_actions=True),
        )
    for layer in (1, 3):
        vectors = pool(seen.hidden[layer], seen.masks, Pooling.ACTION_TOKENS).vectors
        assert torch.equal(vectors, rows.targets[f"vlm.{layer}"])


def test_05_the_last_token_is_a_word_and_not_a_patch(teacher: Any, old_data: Any) -> None:
    batch = teacher.preprocess(read_rows(old_data, [0, 1]))
    seen = teacher.adapter.features(teacher.policy, batch, FeatureRequest(stack="vlm", layers=(3,)))
    words = int(batch["observation.language.attention_mask"][0].sum())
    last = seen.hidden[3][:, 9 + words - 1]
    pooled = pool(seen.hidden[3], seen.masks, Pooling.LAST_TOKEN).vectors
    assert torch.equal(pooled[:, 0], last)


def test_07_an_unusable_cache_stops_the_run(craft: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "anchors.zarr").mkdir()
    result = craft("train", "--mode", "hidden", "--steps", "1", "--batch-size", "2")
    assert result.exit_code == 1
    assert "not a craft cache" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_11_an_anchor_set_smaller_than_a_batch_is_refused_at_once(
    craft: Callable[..., Any], cache: Path
) -> None:
    result = craft("train", "--cache", cache, "--anchor-batch-size", "33", "--steps", "1")
    assert result.exit_code == 1
    assert "fewer than a batch" in result.stderr


def test_14_more_anchors_than_frames_is_refused(craft: Callable[..., Any], tmp_path: Path) -> None:
    result = craft("cache", "build", "--samples", "100000")
    assert result.exit_code == 2
    assert "720 frames" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_17_a_nan_is_never_hidden(teacher: Any, old_data: Any) -> None:
    batch = teacher.preprocess(read_rows(old_data, [0, 1]))
    batch["observation.images.top"][1] = torch.nan
    with torch.no_grad():
        seen = teacher.adapter.features(
            teacher.policy, batch, FeatureRequest(stack="vlm", layers=(3,), with_actions=True)
        )
    for pooling in Pooling:
        vectors = pool(seen.hidden[3], seen.masks, pooling).vectors
        assert torch.isfinite(vectors[0]).all()
        assert vectors[1].isnan().any()


@pytest.mark.slow
def test_18_a_skipped_test_fails_the_run(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\ndef test_a():\n    pass\n\ndef test_b():\n    pytest.skip('no GPU')\n"
    )
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."]
    result = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed, 1 skipped" in result.stdout
    assert result.returncode == 1
