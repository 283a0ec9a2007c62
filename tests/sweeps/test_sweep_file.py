"""The file of a sweep."""

from pathlib import Path
from typing import Any

import pytest

from craftcli.config.train import DEFAULT_CACHE, TrainConfig
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.sweeps.plan import folder_of, plan_sweep
from craftcli.sweeps.progress import Clock
from craftcli.sweeps.sweep_file import SweepSpec, read_sweep

NONE = {"name": "none", "train": {"mode": "none"}}


def spec_of(*arms: dict[str, Any], **others: Any) -> SweepSpec:
    return SweepSpec.from_dict({"arm": list(arms), **others}, folder=Path("here"))


def test_a_file_becomes_jobs(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(
        """
        output = "out"
        seeds = [3, 4]
        [train]
        steps = 7
        [cache]
        samples = 16
        [eval]
        episodes = 5
        [[arm]]
        name = "none"
        train.mode = "none"
        [[arm]]
        name = "hidden"
        train = { mode = "hidden", lambda_init = 2 }
        seeds = [3]
        """
    )
    spec = read_sweep(file)
    plan = plan_sweep(spec)
    assert spec.output == tmp_path / "out"
    assert [(job.arm, job.seed) for job in plan.runs] == [("none", 3), ("none", 4), ("hidden", 3)]
    configs = [job.config for job in plan.runs if job.config]
    assert {(config.steps, config.batch_size) for config in configs} == {(7, 32)}
    assert configs[2].lambda_init == 2.0
    (cache,) = plan.caches
    assert (cache.samples, cache.kind) == (16, "hidden")
    assert configs[2].cache == cache.output == plan.drift_cache
    assert plan.environments == ("demo",)
    assert plan.amounts == {"episodes": 5}


def test_a_grid_is_an_arm_for_every_combination() -> None:
    grid = {"lambda_init": [0.1, 1.0], "retention_every": [1, 5]}
    spec = spec_of({"name": "hidden", "grid": grid})
    assert [arm.name for arm in spec.arms] == [
        "hidden, lambda init 0.1, retention every 1",
        "hidden, lambda init 0.1, retention every 5",
        "hidden, lambda init 1, retention every 1",
        "hidden, lambda init 1, retention every 5",
    ]
    assert spec.arms[1].train == {"lambda_init": 0.1, "retention_every": 5}


def test_arms_share_one_cache_for_all_their_modes() -> None:
    spec = spec_of(
        {"name": "hidden", "train": {"mode": "hidden"}},
        {"name": "action", "train": {"mode": "action"}},
        {"name": "replay", "train": {"mode": "replay"}},
        {"name": "few", "cache": {"samples": 16}},
        {"name": "l2sp", "train": {"mode": "l2sp"}},
    )
    plan = plan_sweep(spec)
    hidden, action, replay, few, l2sp = plan.runs
    assert hidden.cache == action.cache == replay.cache
    assert {cache.kind for cache in plan.caches} == {"hidden+action"}
    assert few.cache not in (None, hidden.cache)
    assert l2sp.cache is None
    assert len(plan.caches) == 2


@pytest.mark.parametrize(
    ("arms", "kind"),
    [
        ([{"name": "default"}, NONE], "hidden+action"),
        ([{"name": "tokens", "train": {"mode": "token_ce"}}], "hidden+token_ce"),
        (
            [
                {"name": "hidden", "train": {"mode": "hidden"}},
                {"name": "half", "merge": {"of": "hidden", "alpha": 0.5}},
            ],
            "hidden",
        ),
    ],
)
def test_a_cache_holds_what_an_arm_without_a_mode_needs(
    arms: list[dict[str, Any]], kind: str
) -> None:
    (cache,) = plan_sweep(spec_of(*arms)).caches
    assert cache.kind == kind


@pytest.mark.parametrize("train", [{"anchors": "auto"}, {"old_tasks": "old.txt"}])
def test_an_arm_may_make_its_own_anchors(train: dict[str, Any]) -> None:
    plan = plan_sweep(spec_of({"name": "own", "train": train}, {"name": "shared"}))
    own, shared = plan.runs
    assert own.cache is None
    assert own.config is not None
    assert own.config.cache == DEFAULT_CACHE
    assert plan.caches == (shared.cache,)


def test_drift_is_measured_on_anchors_that_nothing_was_held_to() -> None:
    plan = plan_sweep(spec_of({"name": "hidden"}, held_out={"samples": 8}))
    trained, held_out = plan.caches
    assert plan.drift_cache == held_out.output
    assert held_out.exclude == trained.output
    assert (held_out.samples, held_out.seed != trained.seed) == (8, True)


def test_held_out_anchors_leave_out_frames_not_drawn_states() -> None:
    drawn = {"name": "drawn", "cache": {"from_statistics": True}}
    alone = plan_sweep(spec_of(drawn, held_out={"samples": 8}))
    assert alone.caches[-1].exclude is None
    plan = plan_sweep(spec_of(drawn, {"name": "frames"}, held_out={"samples": 8}))
    _, frames, held_out = plan.caches
    assert held_out.exclude == frames.output


def test_held_out_anchors_leave_out_frames_of_their_own_dataset_only() -> None:
    other = {"name": "other", "cache": {"dataset": "another/task"}}
    own: dict[str, Any] = {
        "train": {"policy": "a/policy", "dataset": "a/new_task"},
        "cache": {"dataset": "an/old_task"},
        "held_out": {"samples": 8},
    }
    assert plan_sweep(spec_of(other, **own)).caches[-1].exclude is None
    _, frames, held_out = plan_sweep(spec_of(other, {"name": "frames"}, **own)).caches
    assert held_out.exclude == frames.output


def test_a_merge_belongs_to_the_run_of_its_seed() -> None:
    merge = {"name": "half", "merge": {"of": "none", "alpha": 0.5}}
    plan = plan_sweep(spec_of(merge, NONE, seeds=[0, 1]))
    assert [job.arm for job in plan.runs] == ["none", "none", "half", "half"]
    assert [job.base for job in plan.runs[2:]] == [job.folder for job in plan.runs[:2]]
    with pytest.raises(CraftError, match="needs seed 1 of none, which is not trained"):
        plan_sweep(spec_of(merge, {**NONE, "seeds": [0]}, seeds=[0, 1]))


def test_names_that_differ_only_in_signs_have_folders_of_their_own() -> None:
    spec = spec_of(NONE)
    names = ["a b", "a/b", "a, b", "λ", "µ", "..", "hidden+action"]
    assert len({folder_of(spec, name, 0) for name in names}) == len(names)
    assert all(
        folder_of(spec, name, 0).resolve().is_relative_to(Path("here/sweep/runs").resolve())
        for name in names
    )


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "it has no [[arm]]"),
        ({"arm": [NONE], "sedes": [0]}, "unknown key sedes (did you mean seeds?)"),
        ({"arm": [{"nmae": "x"}]}, "did you mean name?"),
        ({"arm": [NONE, NONE]}, "two arms are called 'none'"),
        ({"arm": [NONE], "seeds": [0, 0]}, "not a list of different whole numbers"),
        ({"arm": [NONE], "seeds": 3}, "seeds is not a list"),
        ({"arm": [NONE], "eval": {"episode": 3}}, "did you mean episodes?"),
        ({"arm": [{"name": "m", "merge": {"of": "x", "alpha": 1}}]}, "which no arm trains"),
        ({"arm": [{"name": "m", "merge": {"of": "x"}}]}, "merge lacks alpha"),
        ({"arm": [{"name": "g", "grid": {"lr": 1}}]}, "grid needs a list"),
        ({"arm": [{"name": "s", "train": {"seed": 1}}]}, "is set by the sweep"),
    ],
)
def test_problems_of_a_sweep_are_named(document: dict[str, Any], message: str) -> None:
    with pytest.raises(CraftError) as caught:
        SweepSpec.from_dict(document, folder=Path("here"))
    assert message in str(caught.value)
    assert caught.value.exit_code == EXIT_USAGE


def test_settings_of_an_arm_are_checked_before_anything_runs() -> None:
    with pytest.raises(CraftError, match="Did you mean lambda_init for lamda_init"):
        plan_sweep(spec_of({"name": "x", "train": {"lamda_init": 1}}))
    with pytest.raises(CraftError, match="--steps is 0, below 1"):
        plan_sweep(spec_of({"name": "x", "train": {"steps": 0}}))


def test_a_file_that_is_no_toml(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text("[[arm]")
    with pytest.raises(CraftError, match="Cannot read the sweep"):
        read_sweep(file)


def test_the_time_left_knows_the_kinds_of_jobs() -> None:
    clock = Clock(["cache", "train", "eval", "train", "eval"])
    assert clock.left_s is None
    clock.skip()
    clock.took(10)
    clock.took(2)
    assert clock.left_s == 12


def test_plans_name_the_runs_folders() -> None:
    (job,) = plan_sweep(spec_of(NONE)).runs
    assert isinstance(job.config, TrainConfig)
    assert job.config.output == job.folder == Path("here/sweep/runs/none/seed-0")
