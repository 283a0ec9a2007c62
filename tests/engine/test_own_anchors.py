"""Anchors that a run makes for itself: what they are made of, and that they are found again."""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny.act import ACT, STATE_ONLY
from tiny.diffusion import DIFFUSION
from tiny.diffusion import policy as diffusion_policy
from tiny.family import Family
from tiny.smolvla import SMOLVLA
from tiny.world import FRAMES, TASKS, save, write_dataset

from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import AnchorSource
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.anchor_plan import AnchorPlan, plan_anchors
from craftcli.engine.own_anchors import OwnAnchors, make_anchors, makes_anchors
from craftcli.engine.run import open_run, prepare
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.sources import open_student, open_task_data

ALL_FRAMES = 2 * FRAMES
DIFFUSION_STATES = replace(
    DIFFUSION,
    name="diffusion-states",
    make=lambda folder: save(folder, diffusion_policy(cameras=0)),
)
OLD_TASKS = ("open the drawer", "close the drawer")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of the new task."""
    return write_dataset(tmp_path_factory.mktemp("data") / "new")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """A checkpoint of a family, made once."""
    made: dict[str, Path] = {}

    def of(family: Family) -> Path:
        if family.name not in made:
            made[family.name] = family.make(tmp_path_factory.mktemp(family.name) / "policy")
        return made[family.name]

    return of


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A plan, and the policy that it is for."""

    plan: AnchorPlan
    policy: Any
    config: TrainConfig

    def make(self, folder: Path, plan: AnchorPlan | None = None) -> OwnAnchors:
        return make_anchors(plan or self.plan, self.policy, folder, on_rows=lambda _: None)


@pytest.fixture
def choose(policies: Callable[[Family], Path], new: Path) -> Callable[..., Chosen]:
    """Choose the anchors of a run of a policy of this family on the new data."""

    def of(family: Family, **settings: Any) -> Chosen:
        config = TrainConfig(
            policy=str(policies(family)), dataset=str(new), device="cpu", **settings
        )
        policy = open_student(config)
        plan = plan_anchors(config, policy, open_task_data(config, policy))
        return Chosen(plan=plan, policy=policy, config=config)

    return of


@pytest.fixture
def old_tasks(tmp_path: Path) -> str:
    file = tmp_path / "old_tasks.txt"
    file.write_text("\n".join(OLD_TASKS))
    return str(file)


def test_states_come_from_statistics(choose: Callable[..., Chosen]) -> None:
    chosen = choose(STATE_ONLY)
    assert chosen.plan.source is AnchorSource.STATISTICS
    # The new data shows how numbers move, and is not what the teacher's statistics are fitted to.
    assert chosen.plan.dataset is not None
    assert chosen.plan.normalised is None
    assert chosen.plan.config.from_statistics
    assert chosen.plan.config.rows == 4096
    assert chosen.plan.about.startswith("4096 states drawn from the statistics")
    assert choose(STATE_ONLY, anchor_samples=32).plan.config.rows == 32


def test_language_policies_see_new_frames_under_old_instructions(
    choose: Callable[..., Chosen], old_tasks: str, tmp_path: Path
) -> None:
    chosen = choose(SMOLVLA, old_tasks=old_tasks)
    assert chosen.plan.source is AnchorSource.OLD_INSTRUCTIONS
    assert chosen.plan.about == (
        f"{ALL_FRAMES} frames of the new data under 2 old instructions; no old data is needed"
    )
    made = chosen.make(tmp_path)
    reader = CacheReader.open(made.cache)
    assert made.rows == ALL_FRAMES
    assert tuple(reader.tasks) == OLD_TASKS
    assert set(reader.read_all("index/task").tolist()) == {0, 1}


def test_old_frames_come_first_and_few_are_varied(
    choose: Callable[..., Chosen], tmp_path: Path
) -> None:
    old = str(write_dataset(tmp_path / "old", seed=7))
    for family in (STATE_ONLY, ACT):
        plan = choose(family, old_dataset=old).plan
        assert plan.source is AnchorSource.OLD_FRAMES
        assert (plan.config.samples, plan.config.augment) == (ALL_FRAMES, 63)
        assert plan.about == "16 frames of the old data old and 1008 variations of them"
    fewer = choose(ACT, old_dataset=old, anchor_samples=12).plan
    assert (fewer.config.samples, fewer.config.augment) == (12, 0)
    assert "variations" not in fewer.about


def test_frames_of_a_policy_that_draws_noise_are_stored_several_times(
    choose: Callable[..., Chosen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One draw for each frame is learned by heart; of variations there are as many more."""
    old = str(write_dataset(tmp_path / "old", seed=7))
    varied = choose(DIFFUSION, old_dataset=old).plan.config
    assert (varied.draws, varied.rows) == (1, 4096)
    monkeypatch.setattr("craftcli.engine.anchor_plan.FRAMES", ALL_FRAMES)
    plan = choose(DIFFUSION, old_dataset=old).plan
    assert (plan.config.draws, plan.config.rows) == (4, 4 * ALL_FRAMES)
    assert plan.about == "16 frames of the old data old, each with 4 draws of noise"
    assert choose(ACT, old_dataset=old).plan.config.draws == 1
    assert choose(DIFFUSION, old_dataset=old, anchor_samples=12).plan.config.draws == 1
    assert choose(DIFFUSION, old_dataset=old, mode="action+replay").plan.config.draws == 1


def test_variations_and_diffusion_policies_have_more_anchors_a_step(
    policies: Callable[[Family], Path], new: Path, tmp_path: Path
) -> None:
    old = str(write_dataset(tmp_path / "old", seed=7))
    numbers = itertools.count()

    def anchors(family: Family, **settings: Any) -> int | None:
        """What a run records; its anchors are frames as they are, or as the settings say."""
        config = TrainConfig(
            policy=str(policies(family)),
            dataset=str(new),
            old_dataset=old,
            device="cpu",
            batch_size=32,
            output=tmp_path / f"run-{next(numbers)}",
            **{"anchor_samples": ALL_FRAMES, **settings},
        )
        return open_run(config, {}, Processes()).config.anchor_batch_size

    assert (anchors(ACT), anchors(ACT, anchor_samples=2 * ALL_FRAMES)) == (4, 8)
    assert (anchors(DIFFUSION), anchors(DIFFUSION, anchor_samples=2 * ALL_FRAMES)) == (16, 16)
    assert anchors(ACT, anchor_samples=2 * ALL_FRAMES, anchor_batch_size=3) == 3
    live = {"teacher": "live", "anchor_samples": 2 * ALL_FRAMES}
    assert anchors(ACT, **live) == 8
    assert anchors(ACT, mode="none") is None


def test_a_family_that_statistics_hold_less_says_so(choose: Callable[..., Chosen]) -> None:
    plan = choose(DIFFUSION_STATES).plan
    assert plan.source is AnchorSource.STATISTICS
    assert "--old-dataset" in plan.expectation
    assert plan.expectation != choose(STATE_ONLY).plan.expectation


def test_frames_with_labels_are_not_varied(choose: Callable[..., Chosen], tmp_path: Path) -> None:
    old = str(write_dataset(tmp_path / "old", seed=7))
    plan = choose(ACT, old_dataset=old, mode="action+replay").plan
    assert (plan.config.samples, plan.config.augment) == (ALL_FRAMES, 0)


def test_a_root_and_a_name_are_an_old_dataset_too(
    choose: Callable[..., Chosen], tmp_path: Path
) -> None:
    old = write_dataset(tmp_path / "somewhere", seed=7)
    plan = choose(ACT, old_dataset="me/old", old_dataset_root=str(old)).plan
    assert "the old data me/old" in plan.about


class TestRefusals:
    def refused(self, choose: Callable[..., Chosen], family: Family, **settings: Any) -> CraftError:
        with pytest.raises(CraftError) as error:
            choose(family, **settings)
        assert error.value.exit_code == EXIT_USAGE
        return error.value

    def test_images_without_instructions(self, choose: Callable[..., Chosen]) -> None:
        for family in (ACT, DIFFUSION):
            error = self.refused(choose, family)
            assert "reads images and no instructions. Only old frames" in error.why
            assert "--old-tasks" not in error.fix
            for way in ("--old-dataset", "--old-env", "--mode none"):
                assert way in error.fix

    def test_unknown_instructions(self, choose: Callable[..., Chosen]) -> None:
        error = self.refused(choose, SMOLVLA)
        assert "it reads instructions, and its old ones are not known" in error.why
        for way in ("--old-tasks", "--old-dataset", "--old-env", "--mode none"):
            assert way in error.fix

    def test_no_statistics(
        self, policies: Callable[[Family], Path], new: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "policy"
        shutil.copytree(policies(STATE_ONLY), folder)
        (file,) = folder.glob("policy_preprocessor*normalizer*.safetensors")
        # As in published base models, whose statistics have the names of other datasets.
        save_file({f"so100.buffer.{name}": v for name, v in load_file(file).items()}, file)
        config = TrainConfig(policy=str(folder), dataset=str(new), device="cpu")
        policy = open_student(config)
        with pytest.raises(CraftError) as error:
            plan_anchors(config, policy, open_task_data(config, policy))
        assert "no statistics of observation.state" in error.value.why

    def test_instructions_of_the_new_task(
        self, choose: Callable[..., Chosen], new: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "old.txt"
        for same in (TASKS[1], f" {TASKS[1].upper()}.", "please {task}"):
            file.write_text(f"open the drawer\n{same}\n")
            error = self.refused(choose, SMOLVLA, old_tasks=str(file))
            assert "opposes the task" in error.why
        assert TASKS[0] in self.refused(choose, SMOLVLA, old_tasks=str(new)).why

    def test_instructions_for_a_policy_that_reads_none(
        self, choose: Callable[..., Chosen], old_tasks: str
    ) -> None:
        error = self.refused(choose, ACT, old_tasks=old_tasks)
        assert "policies of type act read no instructions" in error.why

    def test_labels_without_old_data(self, choose: Callable[..., Chosen]) -> None:
        error = self.refused(choose, STATE_ONLY, mode="hidden+ewc")
        assert "ewc learns from the labels of old frames" in error.why


class TestTheFile:
    def test_it_is_found_again_whatever_the_seed_and_the_mode(
        self, choose: Callable[..., Chosen], tmp_path: Path
    ) -> None:
        first = choose(STATE_ONLY, anchor_samples=24).make(tmp_path)
        assert first.cache.parent == tmp_path
        assert not first.reused
        assert first.seconds > 0
        assert (first.rows, first.invalid) == (24, 0)
        lora = "r=2,targets=linear1;linear2"
        for settings in ({"seed": 3}, {"mode": "action"}, {"lora": lora}):
            again = choose(STATE_ONLY, anchor_samples=24, **settings).make(tmp_path)
            assert again.cache == first.cache
            assert again.reused
        assert again.to_json()["source"] == "statistics"

    def test_other_anchors_have_another_name(
        self, choose: Callable[..., Chosen], old_tasks: str, tmp_path: Path
    ) -> None:
        other_tasks = tmp_path / "others.txt"
        other_tasks.write_text("wave")
        made = {
            chosen.make(tmp_path).cache
            for chosen in (
                choose(STATE_ONLY, anchor_samples=16),
                choose(STATE_ONLY, anchor_samples=17),
                choose(SMOLVLA, old_tasks=old_tasks, anchor_samples=4),
                choose(SMOLVLA, old_tasks=str(other_tasks), anchor_samples=4),
            )
        }
        assert len(made) == 4
        assert all(path.name.startswith("anchors-") and len(path.stem) == 20 for path in made)

    def test_an_interrupted_build_is_continued(
        self, choose: Callable[..., Chosen], tmp_path: Path
    ) -> None:
        chosen = choose(STATE_ONLY, anchor_samples=64)
        small = replace(
            chosen.plan, config=replace(chosen.plan.config, chunk_mib=0.01, batch_size=8)
        )
        done = 0

        def interrupt(rows: int) -> None:
            nonlocal done
            done += rows
            if done > 40:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make_anchors(small, chosen.policy, tmp_path, on_rows=interrupt)
        (partial,) = tmp_path.glob("*.partial")
        assert any((partial / "commit/c").iterdir())
        finished = chosen.make(tmp_path, small)
        undisturbed = chosen.make(tmp_path / "other", small)
        assert _bytes(finished.cache) == _bytes(undisturbed.cache)
        assert not list(tmp_path.glob("*.partial"))


def _bytes(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize(
    ("family", "settings"),
    [(STATE_ONLY, {"anchor_samples": 32}), (SMOLVLA, {"old_tasks": "old_tasks"})],
    ids=["statistics", "old instructions"],
)
def test_l_ret_is_zero_on_anchors_of_the_runs_own(
    family: Family,
    settings: dict[str, Any],
    policies: Callable[[Family], Path],
    new: Path,
    old_tasks: str,
    tmp_path: Path,
) -> None:
    if "old_tasks" in settings:
        settings = {"old_tasks": old_tasks}
    config = TrainConfig(
        policy=str(policies(family)),
        dataset=str(new),
        device="cpu",
        output=tmp_path / "runs/one",
        anchor_batch_size=4,
        **settings,
    )
    run = open_run(config, {}, Processes())
    assert run.own_anchors is not None
    assert run.config.cache == run.own_anchors.cache
    assert run.config.cache.parent == tmp_path / "runs"
    assert run.terms is not None
    assert run.terms.anchors is not None
    assert run.opposing_anchors(run.terms.anchors) == 0
    check = prepare(run, run.terms).check
    assert check is not None
    assert check.drift < 1e-6


class TestWhetherAnchorsAreMade:
    @pytest.fixture(autouse=True)
    def in_an_empty_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize(
        ("settings", "made"),
        [
            ({}, True),
            ({"anchors": "cache"}, False),
            ({"cache": Path("other.zarr")}, False),
            ({"mode": "none"}, False),
            ({"mode": "l2sp"}, False),
            ({"mode": "l2sp+action"}, True),
        ],
    )
    def test_without_a_cache(self, settings: dict[str, Any], made: bool) -> None:
        assert makes_anchors(TrainConfig(**settings), cache_given=False) is made

    def test_a_cache_that_was_named_must_exist(self) -> None:
        assert not makes_anchors(TrainConfig(), cache_given=True)

    @pytest.mark.parametrize("left", ["anchors.zarr", "anchors.zarr.partial"])
    def test_what_a_build_left_is_used(self, left: str) -> None:
        Path(left).mkdir()
        assert not makes_anchors(TrainConfig(), cache_given=False)
        # Who says what to make anchors of does not mean that cache.
        assert makes_anchors(TrainConfig(old_tasks="old.txt"), cache_given=False)

    def test_a_cache_and_something_to_make_anchors_of(self) -> None:
        asked: tuple[dict[str, Any], ...] = ({"old_tasks": "old.txt"}, {"old_dataset": "me/old"})
        for settings in asked:
            config = TrainConfig(cache=Path("given.zarr"), **settings)
            with pytest.raises(CraftError, match="contradict each other") as error:
                makes_anchors(config, cache_given=True)
            assert error.value.exit_code == EXIT_USAGE

    @pytest.mark.parametrize(
        ("settings", "problem"),
        [
            ({"anchors": "cache", "anchor_samples": 3}, "--anchor-samples needs --anchors auto"),
            ({"old_tasks": "a", "old_dataset": "b"}, "--old-tasks has no effect with"),
            ({"old_dataset_root": "a"}, "--old-dataset-root needs --old-dataset"),
        ],
    )
    def test_settings_that_contradict(self, settings: dict[str, Any], problem: str) -> None:
        with pytest.raises(CraftError, match=problem):
            TrainConfig(**settings)
