"""No command runs a program that a policy folder names, by whatever way it reaches the folder."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made.hostile_policy import add_step, edit_json, popen_step
from made.manifests import edit_manifest

from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.datasets import NEW, ensure_dataset
from craftcli.engine.checkpoint_manifest import MANIFEST_FILE
from craftcli.sweeps.plan import plan_sweep
from craftcli.sweeps.sweep_file import read_sweep

Craft = Callable[..., Any]
SMALL = ("--device", "cpu", "--batch-size", "2")
EVAL = ("--device", "cpu", "--cache", "anchors.zarr")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and a run of LoRA weights, one step each."""
    from typer.testing import CliRunner

    from craftcli.cli.app import app

    folder = tmp_path_factory.mktemp("runs")
    for name, extra in (("run", ()), ("lora", ("--lora", "r=2,targets=q_proj"))):
        train = ("train", *SMALL, "--mode", "none", "--steps", "1", *extra)
        result = CliRunner().invoke(app, [*train, "-o", str(folder / name)])
        assert result.exit_code == 0, result.output
    return folder


class Here:
    """The folder of a test: a hostile policy, and runs and a cache that can lead to it."""

    def __init__(self, folder: Path, runs: Path, cache: Path) -> None:
        self.marker = folder / "marker"
        self.policy = Path(shutil.copytree(TEACHER_FOLDER, folder / "policy"))
        add_step(self.policy, popen_step(self.marker))
        self.run = Path(shutil.copytree(runs / "run", folder / "run", symlinks=True))
        self.lora = Path(shutil.copytree(runs / "lora", folder / "lora", symlinks=True))
        self.cache = Path(shutil.copytree(cache, folder / "anchors.zarr"))
        # Whoever changes a run on purpose leaves no digests that tell of it.
        for manifest in (*self.run.rglob(MANIFEST_FILE), *self.lora.rglob(MANIFEST_FILE)):
            manifest.unlink()

    def taint(self, run: Path) -> None:
        add_step(run / "checkpoints/last/pretrained_model", popen_step(self.marker))

    def base_of_lora(self) -> Path:
        policy = self.lora / "checkpoints/last/pretrained_model"
        edit_json(policy / "adapter_config.json", base_model_name_or_path=str(self.policy))
        return policy


@pytest.fixture
def here(tmp_path: Path, runs: Path, cache: Path) -> Here:
    return Here(tmp_path, runs, cache)


def own_data() -> tuple[str, ...]:
    return "--dataset", str(ensure_dataset(NEW))


def named(*command: str) -> Callable[[Here], tuple[Any, ...]]:
    """A command to which the user gives the policy with --policy."""
    return lambda here: (*command, "--policy", here.policy)


def named_with_data(*command: str) -> Callable[[Here], tuple[Any, ...]]:
    return lambda here: (*command, "--policy", here.policy, *own_data(), "--device", "cpu")


def tainted_run(*command: str, then: tuple[str, ...] = ()) -> Callable[[Here], tuple[Any, ...]]:
    """A command on a run with a hostile checkpoint."""

    def arguments(here: Here) -> tuple[Any, ...]:
        here.taint(here.run)
        return *command, here.run, *then

    return arguments


def merge_with_run_of_hostile_teacher(here: Here) -> tuple[Any, ...]:
    """The run's settings name the hostile policy as the one that it started from."""
    for file in here.run.rglob("craft_config.json"):
        edit_json(file, policy=str(here.policy))
    return "merge", here.run, "--alpha", "0.5", "-o", "between"


def tainted_teacher_processors(here: Here) -> tuple[Any, ...]:
    """The policy is harmless, and the processors of its teacher beside it are not."""
    checkpoint = here.run / "checkpoints/last"
    beside = checkpoint / "teacher_processors"
    beside.mkdir()
    for file in (checkpoint / "pretrained_model").glob("policy_p*"):
        shutil.copy(file, beside)
    add_step(beside, popen_step(here.marker))
    return "eval", here.run, *EVAL


def sweep(here: Here) -> tuple[Any, ...]:
    data = own_data()[1]
    text = f'[train]\npolicy = "{here.policy}"\ndataset = "{data}"\nsteps = 1\ndevice = "cpu"\n'
    text += f'[cache]\nsamples = 4\ndataset = "{data}"\n'
    text += '[[arm]]\nname = "a"\n[eval]\nenv = ["demo"]\n'
    (here.policy.parent / "sweep.toml").write_text(text)
    return "compare", "--sweep", "sweep.toml"


def hidden_cache(here: Here) -> Path:
    """A cache without outputs, so that the error of actions needs the teacher."""
    from typer.testing import CliRunner

    from craftcli.cli.app import app

    cache = here.policy.parent / "hidden.zarr"
    build = ["cache", "build", "--samples", "4", "--kind", "hidden", "--device", "cpu"]
    assert CliRunner().invoke(app, [*build, "-o", str(cache)]).exit_code == 0
    return cache


def tainted_sweep(here: Here) -> tuple[Any, ...]:
    """A sweep of the demo whose run is trained already, and was prepared by somebody else."""
    text = '[train]\nsteps = 1\ndevice = "cpu"\nbatch_size = 2\n'
    text += '[[arm]]\nname = "a"\ntrain = {mode = "none"}\n[eval]\nenv = ["demo:red"]\n'
    file = here.policy.parent / "sweep.toml"
    file.write_text(text)
    (job,) = plan_sweep(read_sweep(file)).runs
    here.taint(here.run)
    job.folder.parent.mkdir(parents=True)
    here.run.rename(job.folder)
    return "compare", "--sweep", file


COMMANDS: dict[str, Callable[[Here], tuple[Any, ...]]] = {
    "info": named("info", "--policies"),
    "cache build": named_with_data("cache", "build", "--samples", "2", "-o", "new.zarr"),
    "cache inspect": named("cache", "inspect", "anchors.zarr"),
    "cache inspect --verify": named("cache", "inspect", "anchors.zarr", "--verify"),
    "train": named_with_data("train", "--steps", "1"),
    "train --config": lambda here: (
        "train", "--config", _config_file(here), "--device", "cpu", "--steps", "1",
    ),
    "dryrun": named_with_data("dryrun"),
    "eval": lambda here: ("eval", here.policy, *EVAL),
    "eval --teacher": lambda here: (
        "eval", here.run, "--device", "cpu",
        "--cache", hidden_cache(here), "--teacher", here.policy,
    ),
    "merge": lambda here: ("merge", here.policy, "--teacher", "demo", "-o", "out"),
    "merge --teacher": lambda here: (
        "merge", here.run, "--alpha", "0.5", "--teacher", here.policy, "-o", "out",
    ),
    "sweep": sweep,
    "sweep with a run of somebody else's": tainted_sweep,
    "train --teacher live": named_with_data("train", "--steps", "1", "--teacher", "live"),
    "cache build from a run": lambda here: (
        *tainted_run("cache", "build", "--samples", "2", "-o", "new.zarr", "--policy")(here),
        *own_data(), "--device", "cpu",
    ),
    "cache build from LoRA weights": lambda here: (
        "cache", "build", "--samples", "2", "-o", "new.zarr", "--policy", here.base_of_lora(),
        *own_data(), "--device", "cpu",
    ),
    "train from LoRA weights": lambda here: (
        "train", "--policy", here.base_of_lora(), *own_data(), "--device", "cpu", "--steps", "1",
    ),
    "train from a run": lambda here: (
        *tainted_run("train", "--policy")(here), *own_data(), "--device", "cpu", "--steps", "1",
    ),
    "train --resume": tainted_run("train", "--resume"),
    "eval of a run": tainted_run("eval", then=EVAL),
    "eval of a run with a teacher's processors": tainted_teacher_processors,
    "merge of a run": tainted_run("merge", then=("--alpha", "0.5", "-o", "out")),
    "merge with the run's own teacher": merge_with_run_of_hostile_teacher,
    "info of LoRA weights": lambda here: (
        "info", "--policies", "--policy", here.base_of_lora(),
    ),
    "eval of LoRA weights": lambda here: ("eval", here.base_of_lora(), *EVAL),
    "merge of LoRA weights": lambda here: (
        "merge", here.base_of_lora(), "--alpha", "1", "-o", "out",
    ),
    "resume of LoRA weights": lambda here: (
        "train", "--resume", here.base_of_lora().parents[2],
    ),
}  # fmt: skip


def _config_file(here: Here) -> Path:
    file = here.policy.parent / "train.toml"
    file.write_text(f'policy = "{here.policy}"\ndataset = "{own_data()[1]}"\n')
    return file


@pytest.mark.parametrize("way", COMMANDS)
def test_the_command_refuses_the_policy_and_names_the_entry(
    way: str, here: Here, craft: Craft
) -> None:
    result = craft(*COMMANDS[way](here))
    assert not here.marker.exists()
    # A failed check of `craft dryrun` is part of its result.
    assert result.exit_code == (3 if way == "dryrun" else 1), result.output
    assert "Refusing to open the policy" in result.output
    assert "'subprocess.Popen'" in result.output
    assert "policy_preprocessor.json" in result.output
    assert "Fix: " in result.output


@pytest.mark.parametrize("command", ["inspect", "compare"])
def test_looking_at_a_run_opens_no_policy(command: str, here: Here, craft: Craft) -> None:
    here.taint(here.run)
    for settings in here.run.rglob("craft_config.json"):
        edit_json(settings, policy=str(here.policy))
    result = craft(command, here.run)
    assert result.exit_code == 0, result.output
    assert not here.marker.exists()


@pytest.mark.parametrize("policy_type", ["pi0_fast", "craft_tiny_pi0_fast"])
def test_a_manifest_alone_opens_no_policy(policy_type: str, here: Here, craft: Craft) -> None:
    """The second type is the demo's own: then craft's own teacher runs, not the one named."""
    inside = Path(shutil.copytree(here.policy, here.cache / "teacher"))
    edit_manifest(here.cache, source=str(inside), policy_type=policy_type)
    result = craft("cache", "inspect", here.cache, "--verify", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert not here.marker.exists()
    assert ("Not re-run" in result.stdout) == (policy_type == "pi0_fast")


def test_eval_does_not_open_the_teacher_of_a_manifest(
    here: Here, build: Callable[..., Path], craft: Craft
) -> None:
    """The cache holds no outputs, so that the error of actions needs its teacher."""
    cache = build(here.policy.parent / "hidden.zarr", samples=4, kind="hidden")
    edit_manifest(cache, source=str(here.policy), weights_digest="0" * 64)
    for file in here.run.rglob("craft_config.json"):
        edit_json(file, policy=str(here.policy), dataset=own_data()[1])
    result = craft("eval", here.run, "--device", "cpu", "--cache", cache)
    assert not here.marker.exists()
    assert result.exit_code == 0, result.output
    assert "action error" in result.output
    assert "Refusing to open the policy" in result.output
