"""Settings: who chooses their values, and which are refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from craftcli.choices import LossKind, Mode, Pooling, Schedule
from craftcli.config.cache import CacheConfig
from craftcli.config.inspect import InspectConfig
from craftcli.config.retention import RetentionConfig
from craftcli.config.settings import Settings, Source, option_name, resolve
from craftcli.config.train import TrainConfig
from craftcli.errors import EXIT_USAGE, CraftError

DEMO = {"steps": 400, "batch_size": 32}


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """Write a configuration file."""

    def write(text: str) -> Path:
        file = tmp_path / "craft.toml"
        file.write_text(text)
        return file

    return write


def training(flags: dict[str, Any], file: Path | None = None, **more: Any) -> Source[TrainConfig]:
    return resolve(TrainConfig, flags=flags, file=file, demo=DEMO, **more)


def refused(act: Callable[[], Any]) -> CraftError:
    with pytest.raises(CraftError) as caught:
        act()
    assert caught.value.exit_code == EXIT_USAGE
    return caught.value


def test_flag_over_file_over_demo_over_default(written: Callable[[str], Path]) -> None:
    file = written("steps = 7\nseed = 8\nlr = 0.5")
    source = training({"seed": 9, "steps": None, "output": Path("here")}, file)
    decided = {
        name: (getattr(source.settings, name), source.origin[name])
        for name in ("seed", "steps", "lr", "batch_size", "log_every", "output")
    }
    assert decided == {
        "seed": (9, "flag"),
        "steps": (7, "file"),
        "lr": (0.5, "file"),
        "batch_size": (32, "demo"),
        "log_every": (10, "default"),
        "output": (Path("here"), "flag"),
    }
    assert set(source.origin) == set(TrainConfig.names())


def test_a_commands_own_value_is_over_the_file_and_the_demo(
    written: Callable[[str], Path],
) -> None:
    own = {"steps": 3}
    source = training({}, defaults=own)
    assert (source.settings.steps, source.origin["steps"]) == (3, "default")
    source = training({}, written("steps = 20000"), defaults=own)
    assert (source.settings.steps, source.origin["steps"]) == (3, "default")
    source = training({"steps": 7}, written("steps = 20000"), defaults=own)
    assert (source.settings.steps, source.origin["steps"]) == (7, "flag")


@pytest.mark.parametrize("where", ["flag", "file"])
def test_the_demos_values_are_for_the_demo_only(written: Callable[[str], Path], where: str) -> None:
    if where == "flag":
        source = training({"policy": "me/policy", "dataset": "me/data"})
    else:
        source = training({}, written('policy = "me/policy"\ndataset = "me/data"'))
    assert (source.settings.steps, source.origin["steps"]) == (10_000, "default")
    assert not source.settings.is_demo


def test_flags_that_say_no_are_decisions(written: Callable[[str], Path]) -> None:
    source = training({"freeze_downstream": False}, written("freeze_downstream = true"))
    assert (source.settings.freeze_downstream, source.origin["freeze_downstream"]) == (
        False,
        "flag",
    )


def test_a_file_may_spell_names_either_way(written: Callable[[str], Path]) -> None:
    settings = training({}, written("log-every = 3\nsave_every = 4")).settings
    assert (settings.log_every, settings.save_every) == (3, 4)


def test_values_of_a_file_get_the_type_of_their_setting(written: Callable[[str], Path]) -> None:
    settings = training(
        {}, written('mode = "none"\nloss = "l1"\nlambda-max = 3\ncache = "a/b.zarr"')
    ).settings
    assert settings.modes == (Mode.NONE,)
    assert settings.loss is LossKind.L1
    assert isinstance(settings.lambda_max, float)
    assert settings.cache == Path("a/b.zarr")


def test_unknown_keys_are_refused_with_the_closest_match(written: Callable[[str], Path]) -> None:
    error = refused(lambda: training({}, written("stepz = 1\nlamda-lr = 2\nqqq = 3")))
    assert "stepz, lamda-lr, qqq" in error.what
    assert "Did you mean steps for stepz?" in error.why
    assert "Did you mean lambda_lr for lamda-lr?" in error.why
    assert "for qqq" not in error.why


def test_a_setting_of_another_command_is_unknown(written: Callable[[str], Path]) -> None:
    file = written("samples = 4")
    assert resolve(CacheConfig, flags={}, file=file).settings.samples == 4
    assert "samples" in refused(lambda: training({}, file)).what


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("steps = 1.5", "steps is 1.5, not of type int."),
        ("steps = true", "steps is True, not of type int."),
        ('steps = "many"', "steps is 'many', not of type int."),
        ("lr = true", "lr is True, not of type float."),
        ("overwrite = 1", "overwrite is 1, not of type bool."),
        ("policy = 3", "policy is 3, not of type str."),
        ("cache = 3", "cache is 3, not of type Path."),
        ("seed = [1]", "seed is [1], not of type int."),
        ('loss = "huber"', "loss is 'huber', not one of nmse, mse, l1, cosine."),
    ],
)
def test_ill_typed_values_are_refused(written: Callable[[str], Path], text: str, why: str) -> None:
    file = written(text)
    error = refused(lambda: training({}, file))
    assert str(file) in error.what
    assert error.why == why


def test_all_ill_typed_values_come_in_one_message(written: Callable[[str], Path]) -> None:
    error = refused(lambda: training({}, written("steps = 'x'\nlambda-lr = 'y'")))
    assert error.why == "steps is 'x', not of type int. lambda-lr is 'y', not of type float."


@pytest.mark.parametrize("content", [b"steps = ", b"\xff\xfe", b"[steps]\na = 1"])
def test_an_unreadable_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "craft.toml"
    file.write_bytes(content)
    assert str(file) in refused(lambda: training({}, file)).what


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    refused(lambda: training({}, tmp_path / "nothing.toml"))
    refused(lambda: training({}, tmp_path))


def test_all_problems_come_in_one_message() -> None:
    error = refused(
        lambda: TrainConfig(
            steps=0, seed=-1, conflict_threshold=2, lambda_init=11, dataset="me/data"
        )
    )
    for problem in (
        "--steps is 0, below 1.",
        "--seed is -1, below 0.",
        "--conflict-threshold is 2, above 1.",
        "--lambda-init is above --lambda-max.",
        "--policy is needed when the other of --policy and --dataset is given.",
    ):
        assert problem in error.why


BOUNDS = [
    (cls, field.name, side, field.metadata[side])
    for cls in (CacheConfig, TrainConfig)
    for field in dataclasses.fields(cls)
    for side in ("low", "high")
    if field.metadata[side] is not None
]


@pytest.mark.parametrize(("cls", "name", "side", "bound"), BOUNDS)
def test_bounds_are_inclusive(cls: type[Settings], name: str, side: str, bound: float) -> None:
    others: dict[str, Any] = {"lambda_init": 0.0} if name == "lambda_max" else {}
    if name == "epsilon_end":
        others = {"epsilon_schedule": Schedule.LINEAR}
    if name == "old_env_episodes":
        others = {"old_env": "demo:red"}
    cls(**{name: bound, **others})
    beyond = bound - 1 if side == "low" else bound + 1
    assert option_name(name) in refused(lambda: cls(**{name: beyond, **others})).why


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    assert "--lambda-max is" in refused(lambda: RetentionConfig(lambda_max=value)).why


@pytest.mark.parametrize("end", ["epsilon_start", "epsilon_end"])
def test_an_exponential_schedule_needs_positive_budgets(end: str) -> None:
    bounds: dict[str, Any] = {"epsilon_start": 0.1, "epsilon_end": 0.2}
    schedule = Schedule.EXPONENTIAL
    RetentionConfig(epsilon_schedule=schedule, **bounds)
    RetentionConfig(epsilon_schedule=Schedule.LINEAR, **{**bounds, end: 0.0})
    why = refused(lambda: RetentionConfig(epsilon_schedule=schedule, **{**bounds, end: 0.0})).why
    assert "exponential" in why


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"freeze_downstream": True, "mode": Mode.NONE}, "--freeze-downstream needs"),
        ({"epsilon_end": 0.1}, "--epsilon-end needs"),
        ({"epsilon_schedule": Schedule.LINEAR}, "needs --epsilon-end"),
        ({"mode": "hidden+none"}, "--mode none cannot be joined"),
        ({"dataset_root": "here"}, "--dataset-root needs --policy and --dataset"),
        ({"revision": "main"}, "--revision needs --policy and --dataset"),
        ({"lr": 0.0}, "--lr is 0.0, not above 0"),
    ],
)
def test_no_setting_is_ignored_in_silence(given: dict[str, Any], problem: str) -> None:
    assert problem in refused(lambda: TrainConfig(**given)).why


@pytest.mark.parametrize(("given", "missing"), [("policy", "dataset"), ("dataset", "policy")])
def test_policy_and_dataset_come_together(given: str, missing: str) -> None:
    only: dict[str, Any] = {given: "me/x"}
    assert f"--{missing} is needed" in refused(lambda: resolve(CacheConfig, flags=only)).why
    assert CacheConfig(policy="me/x", dataset="me/y").is_demo is False
    assert CacheConfig().is_demo is True


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 3  # type: ignore[misc]


def test_settings_survive_json(written: Callable[[str], Path]) -> None:
    config = CacheConfig(pooling=Pooling.VISION_TEXT, output=Path("a/b.zarr"), seed=3)
    plain = json.loads(json.dumps(config.to_json()))
    lines = [f"{name} = {json.dumps(value)}" for name, value in plain.items() if value is not None]
    file = written("\n".join(lines))
    assert resolve(CacheConfig, flags={}, file=file).settings == config


def test_settings_that_do_not_change_the_result() -> None:
    """Runs that differ in these only are the same run; caches likewise."""
    assert TrainConfig.neutral() == {
        "accept_changes",
        "anchor_root",
        "device",
        # Measurements change no step; --patience only ends the same steps earlier.
        "eval_dataset",
        "eval_env",
        "eval_episodes",
        "eval_every",
        "eval_old_env",
        "from_",
        "keep_last",
        "log_every",
        "output",
        "overwrite",
        "patience",
        "resume",
        "save_every",
        "tracker",
        "workers",
    }
    assert CacheConfig.neutral() == {"device", "output", "overwrite", "resume"}


def test_a_resumed_run_keeps_its_results_and_their_place() -> None:
    kept, asked_again = {"output", "overwrite", "tracker"}, TrainConfig.permissions()
    assert TrainConfig.changeable_on_resume() == (TrainConfig.neutral() - kept) | asked_again


@pytest.mark.parametrize("cls", [CacheConfig, InspectConfig, TrainConfig])
def test_every_setting_has_help(cls: type[Settings]) -> None:
    for field in dataclasses.fields(cls):
        assert field.metadata["help"].endswith(".")


@pytest.mark.parametrize("command", ["cache build", "train", "dryrun"])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sead = 1", "Did you mean seed for sead?"),
        ("seed = 'x'", "seed is 'x', not of type int."),
        ("seed = -1\nbatch_size = 0", "--seed is -1, below 0. --batch-size is 0, below 1."),
        ("seed =", "craft.toml"),
    ],
)
def test_commands_refuse_a_bad_file(
    craft: Callable[..., Any], written: Callable[[str], Path], command: str, text: str, shown: str
) -> None:
    result = craft(*command.split(), "--config", written(text))
    assert result.exit_code == EXIT_USAGE
    assert result.stdout == ""
    assert shown in result.stderr
    assert "Why:" in result.stderr
    assert "Fix:" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_may_use_another_spelling(written: Callable[[str], Path]) -> None:
    source = training({}, written("epsilon = 0.5\nbatch_size = 2\noutput_dir = 'here'"))
    assert source.settings.epsilon_start == 0.5
    assert source.settings.output == Path("here")
    assert source.origin["epsilon_start"] == "file"


def test_two_spellings_of_one_setting_are_refused(written: Callable[[str], Path]) -> None:
    file = written("epsilon = 0.5\nepsilon-start = 0.5")
    error = refused(lambda: training({}, file))
    assert "epsilon and epsilon-start are the same setting" in error.why


def test_the_demos_data_must_be_chosen_for_another_policy() -> None:
    """A run of the demo is trained further on it; who forgets --dataset is told."""
    chosen = training({"policy": "runs/a", "dataset": "demo"}).settings
    assert (chosen.policy, chosen.dataset) == ("runs/a", "demo")
    error = refused(lambda: training({"policy": "runs/a"}))
    assert "--dataset is needed" in error.why
