"""The architecture, as far as imports show it: packages in layers, and no circle anywhere.

A node is a sub-package, or a module that lies directly in a package. Imports inside functions count
as well; those under TYPE_CHECKING do not run, but count too, because readers follow them.
"""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import craftcli

ROOT = Path(craftcli.__file__).parent
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
        "local_datasets",
        "locations",
        "sealed_json",
        "lazy_names",
        "local_policies",
        "patching",
        "system",
        "whole_files",
    ),
)
"""From the top down; a module imports from its own layer and from those below."""
PACKAGE = "craftcli"


@cache
def modules() -> dict[str, Path]:
    """Every module below the package by its dotted name after `craftcli.`."""
    found = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(file: Path) -> Iterator[str]:
    """The modules of craft that a file imports, as far down as they can be named."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == PACKAGE:
                yield _module(name.removeprefix(PACKAGE).removeprefix("."))


def _module(name: str) -> str:
    while name not in modules():
        name = name.rpartition(".")[0]
    return name


def edges() -> Iterator[tuple[str, str]]:
    """Pairs of modules of which the first imports the second."""
    for name, file in modules().items():
        for other in imported(file):
            if other != name:
                yield name, other


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
    assert not [name for name in modules() if not is_entry(name) and layer(name) < 0]


def test_packages_import_downwards_only() -> None:
    upward = [
        f"{one} -> {other}"
        for one, other in edges()
        if not is_entry(one) and not is_entry(other) and layer(other) < layer(one)
    ]
    assert not upward, "\n".join(sorted(upward))


@pytest.mark.parametrize("grain", [node, str], ids=["sub-packages", "modules"])
def test_there_is_no_circle(grain: type[str]) -> None:
    graph: dict[str, set[str]] = {}
    for one, other in edges():
        # A package's front re-exports what lies below it: no dependency of what it contains.
        if modules()[one].name == "__init__.py" or modules()[other].name == "__init__.py":
            continue
        if grain(one) != grain(other):
            graph.setdefault(grain(one), set()).add(grain(other))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))
