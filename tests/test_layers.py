"""The architecture, as far as imports show it: packages in layers, and no circle anywhere.

A node is a sub-package, or a module that lies directly in a package. Imports inside functions count
as well; those under TYPE_CHECKING do not run, but count too, because readers follow them.

The front of a package, its `__init__`, re-exports names for users. Modules of craft import a name
from the module that defines it, so that no circle hides behind a front.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal

import pytest

import craftcli

LAYERS = (
    ("cli",),
    ("sweeps",),
    ("compare",),
    ("plots",),
    ("evaluation",),
    ("engine",),
    ("sources",),
    ("cache",),
    ("policies",),
    ("demo",),
    ("config", "distributed"),
    (
        "choices",
        "errors",
        "lazy_names",
        "local_datasets",
        "local_policies",
        "locations",
        "patching",
        "sealed_json",
        "system",
        "whole_files",
    ),
)
"""From the top down; a module imports from its own layer and from those below."""
PACKAGE = "craftcli"
OF_THE_FRONT = f"{PACKAGE}.__version__"
"""The one name that a front defines itself; every other name is imported from its module."""

type Grain = Literal["sub-packages", "modules"]


@dataclass(frozen=True)
class Tree:
    """The modules of craft below a folder, and what they import."""

    root: Path

    @cached_property
    def modules(self) -> dict[str, Path]:
        """Every module by its dotted name after `craftcli.`; the package's own front is ""."""
        found = {}
        for file in self.root.rglob("*.py"):
            parts = file.relative_to(self.root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
        return found

    def is_front(self, module: str) -> bool:
        """Whether a module is the `__init__` of a package."""
        return self.modules[module].name == "__init__.py"

    def imported(self, module: str) -> Iterator[str]:
        """The full names of craft that a module imports, such as `craftcli.errors.CraftError`."""
        for node in ast.walk(ast.parse(self.modules[module].read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                source = self._source(module, node)
                names = [f"{source}.{alias.name}" for alias in node.names]
            else:
                continue
            yield from (name for name in names if name.split(".")[0] == PACKAGE)

    def edges(self) -> Iterator[tuple[str, str]]:
        """Pairs of modules: the first imports the second."""
        for module in self.modules:
            for name in self.imported(module):
                if (other := self._home(name)) != module and name != OF_THE_FRONT:
                    yield module, other

    def upward(self) -> list[str]:
        """Imports from a lower layer into a higher one."""
        return sorted(
            f"{one} -> {other}"
            for one, other in self.edges()
            if not is_entry(one) and not is_entry(other) and layer(other) < layer(one)
        )

    def through_fronts(self) -> list[str]:
        """Imports of a package's front, whose names come from modules that are not named."""
        return sorted(f"{one} -> {other}" for one, other in self.edges() if self.is_front(other))

    def beyond_fronts(self) -> list[str]:
        """Imports of a front that leave its package: every module of the package runs them."""
        return sorted(
            f"{one} -> {other}"
            for one, other in self.edges()
            if self.is_front(one) and not f"{other}.".startswith(f"{one}." if one else "")
            if other != "lazy_names"
        )

    def circle(self, grain: Grain) -> str | None:
        """A circle of imports. A front is left out: no module imports it."""
        graph: dict[str, set[str]] = {}
        for edge in self.edges():
            if any(map(self.is_front, edge)):
                continue
            one, other = map(node, edge) if grain == "sub-packages" else edge
            if one != other:
                graph.setdefault(one, set()).add(other)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            return " -> ".join(reversed(error.args[1]))
        return None

    def _source(self, module: str, node: ast.ImportFrom) -> str | None:
        """The module that `from ... import` names; dots lead up from the importing module."""
        if not node.level:
            return node.module
        here = [PACKAGE, *module.split(".")] if module else [PACKAGE]
        above = here[: len(here) - node.level + self.is_front(module)]
        return ".".join([*above, node.module] if node.module else above)

    def _home(self, name: str) -> str:
        """The module that a full name is in, as far down as modules can be named."""
        name = name.removeprefix(PACKAGE).removeprefix(".")
        while name not in self.modules:
            name = name.rpartition(".")[0]
        return name


TREE = Tree(Path(craftcli.__file__).parent)


def layer(module: str) -> int:
    """How far from the top the layer of a module is."""
    package = module.split(".")[0]
    (number,) = (i for i, names in enumerate(LAYERS) if package in names)
    return number


def node(module: str) -> str:
    """The sub-package that a module is in, or the module itself where it is in none."""
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 else module


def is_entry(module: str) -> bool:
    """Whether a module stands above all layers: the package's own front, and `python -m`."""
    return module in ("", "__main__")


def test_every_module_has_its_layer() -> None:
    assert not [name for name in TREE.modules if not is_entry(name) and layer(name) < 0]


def test_packages_import_downwards_only() -> None:
    assert TREE.upward() == []


def test_no_module_imports_through_the_front_of_a_package() -> None:
    assert TREE.through_fronts() == []


def test_a_front_imports_only_what_lies_below_it() -> None:
    assert TREE.beyond_fronts() == []


@pytest.mark.parametrize("grain", ["sub-packages", "modules"])
def test_there_is_no_circle(grain: Grain) -> None:
    assert TREE.circle(grain) is None


def made_up(root: Path, **files: str) -> Tree:
    """A package of these modules, named with `__` for a dot, and the fronts that they need."""
    for name, text in files.items():
        file = root.joinpath(*name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        (folder / "__init__.py").touch()
    return Tree(root)


FRONT = "from craftcli.cache.reading.reader import CacheReader"


@pytest.mark.parametrize(
    "line",
    [
        "from craftcli.cache import CacheReader",
        "from craftcli import cache",
        "import craftcli.cache",
        "from . import CacheReader",
    ],
)
def test_a_circle_through_a_front_is_found(tmp_path: Path, line: str) -> None:
    """`format` uses the reader, which uses `format`: only the front is between them."""
    tree = made_up(
        tmp_path, cache__format=line, cache__reading__reader="import craftcli.cache.format"
    )
    (tmp_path / "cache/__init__.py").write_text(FRONT)
    assert tree.circle("modules") is None
    assert tree.through_fronts() == ["cache.format -> cache"]


def test_a_front_that_leads_out_of_its_package_is_found(tmp_path: Path) -> None:
    tree = made_up(tmp_path, cache__format="", config__train="")
    (tmp_path / "cache/__init__.py").write_text("from craftcli.config.train import TrainConfig")
    assert tree.beyond_fronts() == ["cache -> config.train"]


def test_a_version_may_be_taken_from_the_front(tmp_path: Path) -> None:
    tree = made_up(tmp_path, cache__format="from craftcli import __version__")
    assert tree.through_fronts() == []


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    tree = made_up(tmp_path, cache__format="import craftcli.engine.run", engine__run="")
    assert tree.upward() == ["cache.format -> engine.run"]


def test_circles_of_modules_and_of_sub_packages_are_found(tmp_path: Path) -> None:
    modules = made_up(
        tmp_path / "modules", engine__run="from .step import x", engine__step="from . import run"
    )
    assert modules.circle("modules") in (
        "engine.run -> engine.step -> engine.run",
        "engine.step -> engine.run -> engine.step",
    )
    packages = made_up(
        tmp_path / "packages",
        cache__reading__reader="import craftcli.cache.writing.checks",
        cache__reading__rows="",
        cache__writing__checks="",
        cache__writing__writer="import craftcli.cache.reading.rows",
    )
    assert packages.circle("modules") is None
    assert packages.circle("sub-packages") is not None
