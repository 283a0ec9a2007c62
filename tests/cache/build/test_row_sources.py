"""Made rows are rows like any other: the same inputs everywhere, and no loss at the start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made.files import tree
from tiny.act import STATE_ONLY
from tiny.diffusion import policy as diffusion_policy
from tiny.pi0_fast import PI0_FAST
from tiny.processes import together
from tiny.smolvla import SMOLVLA
from tiny.world import save, write_dataset

from craftcli.cache.build.build import BuildReport, build_cache, open_source
from craftcli.cache.build.prompts import read_prompts
from craftcli.cache.build.row_sources import RowSource
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.variations import PARTNERS, SEEDS, WEIGHTS
from craftcli.choices import Images, Kind, LossKind, Mode
from craftcli.config.cache import CacheConfig
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.engine.retention.opening import open_anchors
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.evaluation.cache_check import rerun_teacher
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset
from craftcli.policies.lerobot.input_statistics import input_statistics


def _diffusion_on_states(folder: Path) -> Path:
    return save(folder, diffusion_policy(cameras=0))


POLICIES: dict[str, Callable[[Path], Path]] = {
    "act-states": STATE_ONLY.make,
    "diffusion-history": _diffusion_on_states,
    "pi0_fast": PI0_FAST.make,
    "smolvla": SMOLVLA.make,
}
SETTINGS: dict[str, Any] = {"samples": 4, "batch_size": 4, "device": "cpu"}

type Opened = tuple[Checkpoint, Any]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "old")


@pytest.fixture(scope="module")
def opened(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    """A tiny policy by its name, with the dataset as it reads it."""
    known: dict[str, Opened] = {}

    def get(name: str) -> Opened:
        if name not in known:
            folder = POLICIES[name](tmp_path_factory.mktemp(name) / "policy")
            policy = load_checkpoint(str(folder), device="cpu")
            dataset = open_dataset("tiny/world", root=str(data), policy_config=policy.policy.config)
            known[name] = policy, dataset
        return known[name]

    return get


def make(opened: Opened, output: Path, **settings: Any) -> BuildReport:
    policy, dataset = opened
    config = CacheConfig(**{**SETTINGS, **settings}, output=output, policy="p", dataset="d")
    on_rows = settings.pop("on_rows", lambda _: None)
    return build_cache(config, policy, dataset, on_plan=lambda _: None, on_rows=on_rows)


def source(opened: Opened, **settings: Any) -> RowSource:
    policy, dataset = opened
    config = CacheConfig(**{**SETTINGS, **settings}, policy="p", dataset="d")
    return open_source(config, policy, dataset, read_prompts(config.prompts, config.seed))


def losses(opened: Opened, cache: Path) -> list[float]:
    """L_ret of the teacher on all rows, as training computes it."""
    reader = CacheReader.open(cache)
    anchors = open_anchors(
        reader, opened[0], kinds=(Kind.HIDDEN, Kind.ACTION), batch_size=4, dataset=None
    )
    imitation = anchors.imitation([Mode.HIDDEN, Mode.ACTION])
    with torch.no_grad():
        found = [
            imitation.compare(imitation.features(batch), batch, LossKind.NMSE)
            for batch in (
                anchors.anchors.read(np.arange(start, start + 4), torch.device("cpu"))
                for start in range(0, reader.manifest.rows, 4)
            )
        ]
    return [loss.total.item() for each in found for loss in each.values()]


@pytest.mark.parametrize("images", Images, ids=lambda images: images.value)
@pytest.mark.parametrize("name", POLICIES)
def test_the_teacher_has_no_loss_on_made_rows(
    opened: Callable[[str], Opened], tmp_path: Path, name: str, images: Images
) -> None:
    path = tmp_path / "a.zarr"
    make(opened(name), path, augment=2, images=images)
    reader = CacheReader.open(path)
    assert reader.manifest.rows == 12
    assert (reader.read_all(SEEDS) >= 0).tolist() == [False] * 4 + [True] * 8
    assert max(losses(opened(name), path)) < 1e-6
    assert all(check.passed for check in rerun_teacher(reader, opened(name)[0], range(12)))


@pytest.mark.parametrize("images", Images, ids=lambda images: images.value)
@pytest.mark.parametrize("name", POLICIES)
def test_training_sees_the_inputs_of_the_build_bit_for_bit(
    opened: Callable[[str], Opened], tmp_path: Path, name: str, images: Images
) -> None:
    path = tmp_path / "a.zarr"
    policy, _ = opened(name)
    make(opened(name), path, augment=2, images=images)
    seen = policy.preprocess(source(opened(name), augment=2).read(range(12)).batch)
    anchors = open_anchors(CacheReader.open(path), policy, kinds=[Kind.ACTION]).anchors
    # Another order and other batches than the build's.
    for rows in ([11, 0, 5], [7]):
        inputs = anchors.read(np.array(rows), torch.device("cpu")).inputs
        shared = [key for key in inputs if key.startswith("observation.") and key in seen]
        assert shared
        for key in shared:
            wanted = seen[key][rows]
            # smolvla's instructions are padded to their full length before they are stored.
            got = inputs[key][:, : wanted.shape[1]] if "language" in key else inputs[key]
            assert torch.equal(got, wanted), key


@pytest.mark.parametrize("settings", [{"augment": 3}, {"draws": 4}, {"from_statistics": True}])
def test_rows_do_not_depend_on_their_order_or_batch(
    opened: Callable[[str], Opened], settings: dict[str, Any]
) -> None:
    rows = source(opened("diffusion-history"), **settings)
    count = len(rows)
    whole = rows.read(range(count))
    for some in ([count - 1, 0, count // 2], [1]):
        part = rows.read(some)
        assert part.seeds == [whole.seeds[row] for row in some]
        for name, values in part.index.items():
            np.testing.assert_array_equal(values, whole.index[name][some])
        for name, values in part.batch.items():
            if isinstance(values, torch.Tensor):
                assert torch.equal(values, whole.batch[name][some]), name


def test_real_frames_come_first_and_are_as_they_are(opened: Callable[[str], Opened]) -> None:
    plain = source(opened("act-states")).read(range(4))
    varied = source(opened("act-states"), augment=5).read(range(4))
    assert plain.seeds == varied.seeds
    for name, values in plain.batch.items():
        if isinstance(values, torch.Tensor):
            assert torch.equal(values, varied.batch[name])
    np.testing.assert_array_equal(varied.index[SEEDS], -1)


def test_draws_repeat_the_frames_with_other_noise(
    opened: Callable[[str], Opened], tmp_path: Path
) -> None:
    path = tmp_path / "a.zarr"
    make(opened("diffusion-history"), path, draws=3)
    reader = CacheReader.open(path)
    manifest = reader.manifest
    assert manifest.made is not None
    assert (manifest.rows, manifest.made.source, manifest.made.rows) == (12, "draws", 8)
    states = reader.read_all("inputs/observation.state")
    np.testing.assert_array_equal(states, np.concatenate([states[:4]] * 3))
    noise = reader.read_all("inputs/craft.noise")
    assert len(np.unique(noise.reshape(12, -1), axis=0)) == 12
    np.testing.assert_array_equal(reader.read_all(PARTNERS)[4:], -1)
    assert max(losses(opened("diffusion-history"), path)) < 1e-6


@pytest.mark.parametrize("name", ["act-states", "diffusion-history"])
def test_statistics_alone_make_a_cache_that_checks_out(
    opened: Callable[[str], Opened], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "a.zarr"
    policy, _ = opened(name)
    make((policy, None), path, from_statistics=True, samples=8)
    reader = CacheReader.open(path)
    assert reader.manifest.made is not None
    assert (reader.manifest.made.source, reader.manifest.made.rows) == ("statistics", 8)
    assert max(losses((policy, None), path)) < 1e-6
    assert all(check.passed for check in rerun_teacher(reader, policy, range(8)))
    states = reader.read_all("inputs/observation.state")
    assert len(np.unique(states.reshape(8, -1), axis=0)) == 8
    if name == "diffusion-history":
        np.testing.assert_array_equal(states[:, 0], states[:, 1])


def test_drawn_states_move_as_a_dataset_shows(
    opened: Callable[[str], Opened], tmp_path: Path
) -> None:
    path = tmp_path / "a.zarr"
    policy, dataset = opened("diffusion-history")
    make((policy, dataset), path, from_statistics=True, samples=8)
    reader = CacheReader.open(path)
    states = reader.read_all("inputs/observation.state")
    assert (states[:, 0] != states[:, 1]).any()
    # None of its frames is an anchor, and its statistics are not asked for.
    assert reader.manifest.dataset.repo_id == "statistics"
    assert reader.manifest.statistics is None
    assert max(losses((policy, None), path)) < 1e-6


def test_a_cache_from_statistics_has_no_labels(
    opened: Callable[[str], Opened], tmp_path: Path
) -> None:
    path = tmp_path / "a.zarr"
    policy, _ = opened("act-states")
    make((policy, None), path, from_statistics=True, samples=4)
    with pytest.raises(CraftError, match="has no labels"):
        open_anchors(CacheReader.open(path), policy, kinds=[Kind.ACTION], labels=True)


@pytest.mark.parametrize("name", ["act-states", "smolvla"])
def test_a_killed_build_resumes_to_the_same_bytes(
    opened: Callable[[str], Opened], tmp_path: Path, name: str
) -> None:
    small: dict[str, Any] = {"augment": 3, "chunk_mib": 0.002}
    make(opened(name), tmp_path / "whole.zarr", **small)
    path = tmp_path / "killed.zarr"
    seen: list[int] = []

    def kill(rows: int) -> None:
        seen.append(rows)
        if len(seen) == 3:
            raise KeyboardInterrupt

    policy, dataset = opened(name)
    config = CacheConfig(**{**SETTINGS, **small}, output=path, policy="p", dataset="d")
    with pytest.raises(KeyboardInterrupt):
        build_cache(config, policy, dataset, on_plan=lambda _: None, on_rows=kill)
    with pytest.raises(CraftError, match="made"):
        make(opened(name), path, **small, augment_noise=0.1, resume=True)
    assert make(opened(name), path, **small, resume=True).reused > 0
    assert tree(path) == tree(tmp_path / "whole.zarr")


@pytest.mark.parametrize("settings", [{"augment": 3}, {"from_statistics": True, "samples": 16}])
def test_two_processes_write_the_same_bytes_as_one(
    opened: Callable[[str], Opened], tmp_path: Path, settings: dict[str, Any]
) -> None:
    small: dict[str, Any] = {**settings, "chunk_mib": 0.002}
    make(opened("act-states"), tmp_path / "one.zarr", **small)

    def share() -> None:
        make(opened("act-states"), tmp_path / "two.zarr", **small)

    together(share)
    assert CacheReader.open(tmp_path / "two.zarr").manifest.chunk_count > 1
    assert tree(tmp_path / "two.zarr") == tree(tmp_path / "one.zarr")


def test_a_teacher_that_is_not_finite_on_a_made_row_is_not_trained_on(
    opened: Callable[[str], Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _ = opened("act-states")
    adapter, real = type(policy.adapter), type(policy.adapter).features
    unlucky = source(opened("act-states"), augment=2).read([6]).batch
    state = policy.preprocess(unlucky)["observation.state"]

    def features(self: Any, module: Any, batch: Any, request: Any) -> Any:
        found = real(self, module, batch, request)
        bad = (batch["observation.state"] == state).all(-1)
        for values in found.hidden.values():
            values[bad] = torch.nan
        return found

    monkeypatch.setattr(adapter, "features", features)
    report = make(opened("act-states"), tmp_path / "a.zarr", augment=2)
    assert (len(report.invalid), report.invalid_made) == (1, 1)
    reader = CacheReader.open(tmp_path / "a.zarr")
    assert np.flatnonzero(~reader.read_all("valid")).tolist() == [6]
    anchors: AnchorSet = open_anchors(reader, policy, kinds=[Kind.ACTION], batch_size=11).anchors
    assert 6 not in anchors.walk.rows(0)


def test_one_frame_has_no_partner(opened: Callable[[str], Opened], tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    make(opened("act-states"), path, samples=1, augment=3)
    reader = CacheReader.open(path)
    np.testing.assert_array_equal(reader.read_all(PARTNERS), reader.read_all("index/dataset_index"))
    assert len(np.unique(reader.read_all("inputs/observation.state"), axis=0)) == 4


def test_weights_and_partners_are_of_two_frames(opened: Callable[[str], Opened]) -> None:
    index = source(opened("act-states"), augment=20).read(range(4, 84)).index
    assert (index[PARTNERS] != index["index/dataset_index"]).all()
    assert ((index[WEIGHTS] >= 0.5) & (index[WEIGHTS] <= 1)).all()


def test_fixed_numbers_are_those_of_the_frame(opened: Callable[[str], Opened]) -> None:
    fixed = "observation.state:0,2-3,observation.environment_state"
    rows = source(opened("act-states"), augment=5, augment_fixed=fixed)
    assert rows.made is not None
    assert rows.made.settings["fixed"] == (
        "observation.state:0,2,3,observation.environment_state:0,1,2"
    )
    raw = rows.read(range(24))
    frames = source(opened("act-states")).read(range(4))
    of = {int(f): row for row, f in enumerate(frames.index["index/dataset_index"])}
    first = [of[int(f)] for f in raw.index["index/dataset_index"]]
    states, plain = (
        x["observation.state"]
        for x in (
            raw.batch,
            {k: v[first] for k, v in frames.batch.items() if isinstance(v, torch.Tensor)},
        )
    )
    assert torch.equal(states[:, [0, 2, 3]], plain[:, [0, 2, 3]])
    assert (states[4:, 1] != plain[4:, 1]).all()


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ("observation.stat", "observation.state, observation.environment_state"),
        ("observation.state:4", "has 4 numbers"),
    ],
)
def test_fixed_numbers_that_do_not_exist_are_refused(
    opened: Callable[[str], Opened], fixed: str, message: str
) -> None:
    with pytest.raises(CraftError) as caught:
        source(opened("act-states"), augment=1, augment_fixed=fixed)
    assert message in caught.value.why
    assert caught.value.exit_code == EXIT_USAGE


def test_statistics_of_the_policy_are_read(opened: Callable[[str], Opened]) -> None:
    found = input_statistics(opened("diffusion-history")[0])
    assert found.histories == {"observation.state": 2, "observation.environment_state": 2}
    assert (found.cameras, found.missing) == ((), ())
