"""The commands and programs of the README and the pages run, on the demo and with small sizes."""

import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
from made.remote_cache import served
from pages import INDEX, PAGES, README, ROOT, blocks, craft_arguments
from typer.testing import CliRunner

from craftcli.cli.app import app
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER

SMALLER = {
    ("cache", "build"): ["--samples", "16"],
    ("train",): ["--steps", "3", "--batch-size", "4", "--anchor-batch-size", "4"],
    ("eval",): ["--episodes", "1"],
}
"""Options appended to every command that begins so; the last value of an option counts."""
AS_WRITTEN = ("--resume", "--indices")
"""Commands with these options allow no other size."""
SMALLER_SWEEP = {
    r"^steps = \d+": "steps = 1\nbatch_size = 4\nanchor_batch_size = 4",
    r"samples = \d+": "samples = 8",
    r"^episodes = \d+": "episodes = 1",
    r"^seeds = .*": "seeds = [0]",
}
"""What is replaced in the file of a sweep."""
NOT_RUN = {
    "outputs/my_policy": "a policy of the reader's own; tests/cli runs these options on others",
    " me/": "a policy or dataset on the Hub",
    "--resume runs/": "an interrupted run; tests/cli/test_train_resume.py interrupts some",
    "OLD_DIR": "shards of the prototypes; tests/cache/transfer writes some",
    "metaworld:": "a policy that knows Meta-World; tests/evaluation rolls one out",
}
"""Why a command that contains this is only parsed."""
IN_PROGRAMS = {'"outputs/my_policy"': repr(str(TEACHER_FOLDER)), '"cuda"': '"cpu"'}
"""What is replaced in programs."""

COUNTS = {
    "anchors": 4,
    "benchmarks": 1,
    "caches": 10,
    "compare": 7,
    "datasets": 3,
    "evaluation": 7,
    "log": 2,
    "lora": 5,
    "modes": 15,
    "object_stores": 3,
    "policies": 3,
    "processes": 4,
    "statistics": 4,
    "trust": 3,
}
"""How many commands and programs of each page run, so that none is overlooked."""
ELSEWHERE = {"users_day": "tests/examples/test_users_day.py"}
"""Pages with commands of LeRobot's, and the tests that run them."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder from which the pages start, made by the commands of their index."""
    folder = tmp_path_factory.mktemp("start")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_page(INDEX) == 3
    return folder


def run_page(page: Path) -> int:
    """Run or parse everything in a page, in order; returns how many commands and programs ran."""
    ran = 0
    for block in blocks(page):
        if block.language == "sh":
            ran += sum(run_or_parse(words) for words in block.commands)
        elif block.language == "toml":
            Path("sweep.toml").write_text(smaller_sweep(block.text), encoding="utf-8")
        elif block.language == "python":
            run_program(block.text)
            ran += 1
    return ran


def run_or_parse(words: list[str]) -> bool:
    """Run a command of craft and return True; only check a command that cannot run here."""
    arguments = craft_arguments(words)
    if arguments is None:
        check_other_command(words)
        return False
    if words[0] not in ("craft", "uv") or any(part in " ".join(words) for part in NOT_RUN):
        parse(arguments)
        return False
    for begin, options in SMALLER.items():
        if tuple(arguments[: len(begin)]) == begin and not set(AS_WRITTEN) & set(arguments):
            arguments = [*arguments, *options]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, f"craft {' '.join(arguments)}\n{result.output}"
    return True


def parse(arguments: list[str]) -> None:
    """Fail on a command or an option that does not exist, or a value that cannot be."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "resolve_command"):
        with command.make_context("craft", list(arguments)) as context:
            _, command, arguments = command.resolve_command(context, arguments)
    command.make_context("craft", list(arguments)).close()


def check_other_command(words: list[str]) -> None:
    """Check what can be checked of a command that does not start craft."""
    script = next((word for word in words if word.endswith(".py")), None)
    if script is None:
        assert words[0] in ("pip", "uv"), words
        return
    text = (ROOT / script).read_text("utf-8")
    options = [word for word in words[words.index(script) :] if word.startswith("--")]
    assert all(option in text for option in options), words


def smaller_sweep(text: str) -> str:
    for pattern, replacement in SMALLER_SWEEP.items():
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        assert count > 0, pattern
    return text


def run_program(text: str) -> None:
    for old, new in IN_PROGRAMS.items():
        text = text.replace(old, new)
    exec(compile(text, "page", "exec"), {"__name__": "page"})


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(README) == 4


def test_every_page_is_run() -> None:
    assert sorted([*COUNTS, *ELSEWHERE]) == [page.stem for page in PAGES]
    for page, test in ELSEWHERE.items():
        assert f"examples/pages/{page}.md" in (ROOT / test).read_text("utf-8")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem in COUNTS], ids=lambda page: page.stem
)
def test_page(page: Path, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(start, tmp_path, dirs_exist_ok=True, symlinks=True)
    monkeypatch.chdir(tmp_path)
    # The s3://bucket of the page is a local server's.
    with served("bucket") if page.stem == "object_stores" else nullcontext():
        assert run_page(page) == COUNTS[page.stem]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (["train", "--no-such-option"], "No such option"),
        (["trian"], "No such command"),
        (["train", "--steps", "many"], "valid integer"),
    ],
)
def test_a_wrong_command_is_noticed(wrong: list[str], error: str) -> None:
    with pytest.raises(Exception, match=error):
        parse(wrong)
