"""pyproject.toml declares every package that the code imports, and no other."""

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

NOT_IMPORTED = {
    "numcodecs": "zarr's codecs; the bound keeps out versions that do not know Zarr v3",
    "tensorboard": "imported by torch.utils.tensorboard",
    "dm-tree": "imported by LeRobot's groot",
    "coverage": "measures the tests",
    "pytest-cov": "measures the tests",
    "pytest-xdist": "runs the tests",
    "mypy": "checks the types",
    "ruff": "checks the style",
}


def imported(folder: str) -> set[str]:
    """Names of the top-level packages that the files of a folder import."""
    return {name for file in (ROOT / folder).rglob("*.py") for name in _imports(file)}


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@cache
def _homes() -> Mapping[str, list[str]]:
    return packages_distributions()


@cache
def _modules_of_tests_and_examples() -> set[str]:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    packages = {file.parent.name for file in files if file.name == "__init__.py"}
    return {"craftcli", *packages, *(file.stem for file in files)}


def distributions(names: Iterable[str]) -> set[str]:
    """The packages of a registry that bring these imports, without Python's own and ours."""
    homes, ours = _homes(), _modules_of_tests_and_examples()
    found: set[str] = set()
    for name in names:
        if name in sys.stdlib_module_names or name in ours:
            continue
        assert name in homes, f"{name} is imported, and no installed package brings it"
        found.add(str(canonicalize_name(homes[name][0])))
    return found


def declared(requirements: Iterable[str]) -> set[str]:
    """The names of requirements."""
    return {str(canonicalize_name(Requirement(text).name)) for text in requirements}


NEEDED = declared(PROJECT["project"]["dependencies"])
EXTRAS = declared(r for rs in PROJECT["project"]["optional-dependencies"].values() for r in rs)
DEV = declared(PROJECT["dependency-groups"]["dev"])


def test_the_package_declares_its_imports() -> None:
    found = distributions(imported("craftcli"))
    assert len(found) > 15
    assert found - NEEDED - EXTRAS == set()


def test_tests_and_examples_declare_theirs() -> None:
    brought_by_lerobot = {"datasets"}
    found = distributions(imported("tests") | imported("examples"))
    assert found - NEEDED - EXTRAS - DEV == brought_by_lerobot


def test_declared_packages_are_imported() -> None:
    used = distributions(imported("craftcli") | imported("tests"))
    assert (NEEDED | EXTRAS | DEV) - used == NOT_IMPORTED.keys() - used


def test_every_bound_has_a_lower_end() -> None:
    texts = PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["dev"]
    assert [
        text
        for text in texts
        if not {">=", "=="} & {s.operator for s in Requirement(text).specifier}
    ] == []
