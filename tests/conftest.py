"""Fixtures of all tests: the demo's teacher and data, one cache, and the `craft` command."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Set before torch is imported: on two shared cores, spinning threads make tests far slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No test may use the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from typer.testing import CliRunner

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

FAULTS = "faults"
"""What a test records of its faults, for the end of the report."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run with a skipped test, which has shown nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and reporter.stats.get("skipped") and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which faults were tried, also when all tests pass: every run tries others."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    properties = [own for report in reports for own in getattr(report, "user_properties", ())]
    lines = dict.fromkeys(text for name, text in properties if name == FAULTS)
    if lines:
        terminalreporter.section(FAULTS)
    for line in lines:
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest files, so that no process waits for them at the end.

    `--no-loadscope-reorder` in pyproject.toml keeps this order: xdist would put files with few
    tests last, and these are the longest.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: ("examples" not in item.path.parts, -slow[item.path]))


@pytest.fixture(scope="session", autouse=True)
def demo_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary home for the demo's datasets, so that no test depends on the user's."""
    home = tmp_path_factory.mktemp("craft-home")
    before = os.environ.get("CRAFT_HOME")
    os.environ["CRAFT_HOME"] = str(home)
    yield home
    if before is None:
        del os.environ["CRAFT_HOME"]
    else:
        os.environ["CRAFT_HOME"] = before


@pytest.fixture(scope="session")
def teacher() -> Any:
    """The demo's teacher, opened; tests must not change it."""
    from craftcli.config.cache import CacheConfig
    from craftcli.sources import open_policy

    return open_policy(CacheConfig(device="cpu"))


@pytest.fixture
def student() -> Any:
    """A copy of the teacher that a test may train."""
    from craftcli.config.train import TrainConfig
    from craftcli.sources import open_policy

    return open_policy(TrainConfig(device="cpu"))


@pytest.fixture(scope="session")
def old_data(teacher: Any) -> Any:
    """The demo's old task as a LeRobotDataset."""
    from craftcli.config.cache import CacheConfig
    from craftcli.sources import open_anchor_data

    return open_anchor_data(CacheConfig(device="cpu"), teacher)


@pytest.fixture(scope="session")
def new_data(teacher: Any) -> Any:
    """The demo's new task as a LeRobotDataset."""
    from craftcli.config.train import TrainConfig
    from craftcli.sources import open_task_data

    return open_task_data(TrainConfig(device="cpu"), teacher)


@pytest.fixture(scope="session")
def build(teacher: Any, old_data: Any) -> Callable[..., Path]:
    """Build a cache of the demo's teacher with these settings; by default with its images."""
    from craftcli.cache.build.build import build_cache
    from craftcli.choices import Images
    from craftcli.config.cache import CacheConfig

    def build_with(output: Path, **settings: Any) -> Path:
        defaults = {"samples": 32, "device": "cpu", "images": Images.EMBED}
        config = CacheConfig(**{**defaults, **settings}, output=output)
        build_cache(config, teacher, old_data, on_plan=lambda _: None, on_rows=lambda _: None)
        return output

    return build_with


@pytest.fixture(scope="session")
def cache(build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small cache with default settings; tests must not change it."""
    return build(tmp_path_factory.mktemp("cache") / "anchors.zarr")


@pytest.fixture
def craft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a `craft` command in an empty folder, in this process."""
    from craftcli.cli.app import app

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Any:
        return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)

    return run
