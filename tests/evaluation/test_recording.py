"""Anchors from the teacher's own episodes."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from craftcli.cache.build.build import build_cache
from craftcli.cache.build.prompts import Prompts
from craftcli.cache.build.recorded_rows import RecordedFrames, RecordedRows
from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Mode
from craftcli.config.cache import CacheConfig
from craftcli.config.train import TrainConfig
from craftcli.engine.retention.opening import open_terms
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.evaluation.recording import Recording, open_all, record
from craftcli.evaluation.simulators.base import Environment, StepResult
from craftcli.evaluation.simulators.demo import demo_environments
from craftcli.policies.lerobot.input_statistics import input_statistics

STATE = "observation.state"


def recorded(teacher: Any, *, samples: int = 12, seed: int = 0, episodes: int = 3) -> Recording:
    return record(
        teacher,
        demo_environments(("red", "green")),
        episodes=episodes,
        samples=samples,
        seed=seed,
    )


@pytest.fixture(scope="module")
def recording(teacher: Any) -> Recording:
    return recorded(teacher)


def places(found: Recording) -> list[tuple[int, int]]:
    return [(frame.episode, frame.frame) for frame in found.recorded.frames]


def test_frames_are_drawn_from_all_episodes(recording: Recording) -> None:
    assert len(set(places(recording))) == 12
    assert places(recording) == sorted(places(recording))
    assert recording.frames_seen > 12
    assert recording.recorded.episodes == 6
    assert {frame.task for frame in recording.recorded.frames} == {
        "reach the red block",
        "reach the green block",
    }
    assert [success.count for success in recording.successes] == [3, 3]


def test_the_seed_decides_the_frames(teacher: Any, recording: Recording) -> None:
    def fingerprint(found: Recording) -> str:
        rows = RecordedRows(found.recorded, input_statistics(teacher), Prompts(), seed=0)
        return rows.identity().fingerprint

    again = recorded(teacher)
    assert fingerprint(again) == fingerprint(recording)
    assert fingerprint(again).startswith("rollouts:")
    assert fingerprint(recorded(teacher, seed=1)) != fingerprint(recording)


def test_more_samples_contain_fewer(teacher: Any, recording: Recording) -> None:
    assert set(places(recorded(teacher, samples=5))) < set(places(recording))


def build(teacher: Any, found: Recording, output: Path, **settings: Any) -> CacheReader:
    config = CacheConfig(
        env="demo:red,demo:green", samples=12, device="cpu", output=output, **settings
    )
    build_cache(config, teacher, found.recorded, on_plan=lambda _: None, on_rows=lambda _: None)
    return CacheReader.open(output)


def test_a_cache_of_them_needs_no_dataset(
    teacher: Any, student: Any, recording: Recording, tmp_path: Path
) -> None:
    reader = build(teacher, recording, tmp_path / "a.zarr")
    manifest = reader.manifest
    assert manifest.made is not None
    assert (manifest.made.source, manifest.made.rows, manifest.images) == (
        "rollouts",
        12,
        "embedded",
    )
    assert not manifest.has_dataset
    assert reader.read_all("index/episode").tolist() == [
        episode for episode, _ in places(recording)
    ]
    assert reader.read_all("index/frame").tolist() == [frame for _, frame in places(recording)]
    config = TrainConfig(anchor_batch_size=12, device="cpu")
    losses = open_terms(config, student, tmp_path / "a.zarr").losses(0)
    assert set(losses) == {Mode.HIDDEN, Mode.ACTION}
    assert max(loss.total.item() for loss in losses.values()) < 1e-6


def test_a_killed_build_resumes_to_the_same_bytes(
    teacher: Any, recording: Recording, tmp_path: Path
) -> None:
    settings = {"chunk_mib": 0.05, "batch_size": 4}
    whole = build(teacher, recording, tmp_path / "whole.zarr", **settings)

    def kill(rows: int) -> None:
        raise InterruptedError

    config = CacheConfig(
        env="demo:red,demo:green",
        samples=12,
        device="cpu",
        output=tmp_path / "a.zarr",
        chunk_mib=0.05,
        batch_size=4,
    )
    done: list[int] = []
    with pytest.raises(InterruptedError):
        build_cache(
            config,
            teacher,
            recording.recorded,
            on_plan=lambda _: None,
            on_rows=lambda rows: kill(rows) if len(done) == 2 else done.append(rows),
        )
    report = build_cache(
        dataclasses.replace(config, resume=True),
        teacher,
        recorded(teacher).recorded,
        on_plan=lambda _: None,
        on_rows=lambda _: None,
    )
    assert report.reused
    resumed = CacheReader.open(tmp_path / "a.zarr")
    for name in whole.array_names():
        np.testing.assert_array_equal(whole.read_all(name), resumed.read_all(name))


class Counting:
    """A world whose state is the number of the step."""

    def __init__(self, over_after: int = 5) -> None:
        self._over_after = over_after
        self._state = np.zeros(2, dtype=np.float32)

    def reset(self, seed: int) -> StepResult:
        self._state[:] = 0
        return self._result()

    def step(self, action: NDArray[Any]) -> StepResult:
        self._state += 1
        return self._result()

    def close(self) -> None:
        """Do nothing."""

    def _result(self) -> StepResult:
        image = np.full((16, 16, 3), self._state[0], dtype=np.uint8)
        observation = {
            STATE: self._state,  # the same buffer again, as some simulators do
            "observation.images.camera": image,
            "observation.image": image,
            "task": "count",
        }
        return StepResult(observation=observation, over=self._state[0] >= self._over_after)


def actor(steps: list[int] | None) -> Any:
    """A policy that reads these observations and does nothing."""
    config = SimpleNamespace(
        type="still",
        observation_delta_indices=steps,
        input_features={STATE: None},
        image_features={},
    )
    policy = SimpleNamespace(
        config=config,
        eval=lambda: None,
        reset=lambda: None,
        parameters=lambda: iter([torch.zeros(1)]),
        select_action=lambda batch: torch.zeros(len(batch[STATE]), 2),
    )
    return SimpleNamespace(
        policy=policy, preprocess=lambda b: b, postprocess=lambda a: a, renames={}
    )


WORLD = Environment(name="counting", make=Counting, max_steps=9)


@pytest.mark.parametrize(("samples", "frames"), [(19, "at most 18 frames"), (11, "10 frames")])
def test_too_few_frames_are_refused(samples: int, frames: str) -> None:
    """Before the first episode where the longest ones are not enough, or else after the last."""
    with pytest.raises(CraftError, match=f"in each of counting have {frames}") as error:
        record(actor(None), [WORLD], episodes=2, samples=samples)
    assert error.value.exit_code == EXIT_USAGE
    assert "--env-episodes" in str(error.value.fix)


def test_a_history_stays_in_its_episode() -> None:
    found = record(actor([-2, -1, 0]), [WORLD], episodes=2, samples=10)
    for frame in found.recorded.frames:
        now = frame.frame
        assert frame.observation[STATE][:, 0].tolist() == [max(now - 2, 0), max(now - 1, 0), now]
        assert frame.observation["observation.image"].shape == (3, 16, 16, 3)
    rows = RecordedRows(
        found.recorded,
        SimpleNamespace(blank_actions=lambda n: {"action": torch.zeros(n, 2)}),  # type: ignore[arg-type]  # all that is used
        Prompts(),
        seed=0,
    )
    batch = rows.read([3, 0]).batch
    assert batch["observation.image"].shape == (2, 3, 3, 16, 16)
    assert batch[STATE].shape == (2, 3, 2)
    assert batch["task"] == ["count", "count"]
    assert batch["action"].shape == (2, 2)


def test_one_observation_has_no_axis_of_time() -> None:
    found = record(actor(None), [WORLD], episodes=1, samples=5)
    assert [frame.observation[STATE].tolist() for frame in found.recorded.frames] == [
        [n, n] for n in range(5)
    ]


def test_observations_to_come_are_refused() -> None:
    with pytest.raises(CraftError, match="cannot be recorded"):
        record(actor([0, 1]), [WORLD], episodes=1, samples=1)


def test_an_environment_named_twice_is_opened_once(teacher: Any) -> None:
    found = open_all(("demo", "demo:red"), teacher.policy.config)
    assert [e.name for e in found] == ["demo:red", "demo:green", "demo:yellow", "demo:blue"]


def test_prompts_replace_the_instructions(teacher: Any, recording: Recording) -> None:
    prompts = Prompts(lines=("please {task}",))
    rows = RecordedRows(recording.recorded, input_statistics(teacher), prompts, seed=0)
    raw = rows.read([0, 11])
    assert raw.batch["task"] == ["please reach the red block", "please reach the green block"]
    assert [rows.tasks[n] for n in raw.index["index/task"]] == raw.batch["task"]


def test_recorded_frames_are_what_the_manifest_says(teacher: Any, recording: Recording) -> None:
    fewer = RecordedFrames(
        frames=recording.recorded.frames[:3], environments=("demo:red",), episodes=3
    )
    rows = RecordedRows(fewer, input_statistics(teacher), Prompts(), seed=0)
    assert (len(rows), rows.made.settings) == (3, {"environments": "demo:red", "episodes": "3"})
