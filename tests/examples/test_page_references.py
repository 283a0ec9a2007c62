"""What the README and the pages refer to exists, and the README is short."""

import re
from pathlib import Path

import pytest
from pages import EVERY_PAGE, README, ROOT

_LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
_PATH = re.compile(r"`((?:craftcli|tests|examples|\.ci|\.github)/[\w./*-]*)`")


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    links = [link for link in _LINK.findall(re.sub(r"\n\s*", "", text)) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in _PATH.findall(text) if not list(ROOT.glob(path))]
    assert missing == []


def test_the_tests_of_the_page_on_trust_exist() -> None:
    text, file, found = (ROOT / "examples/pages/trust.md").read_text("utf-8"), "", 0
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", text):
        file = path or file
        assert re.search(rf"^ *def {name}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE), name
        found += 1
    assert found > 15


def test_the_architecture_lists_every_module() -> None:
    text = (ROOT / ".github/ARCHITECTURE.md").read_text("utf-8")
    rows = re.findall(r"^\| `(craftcli/[\w/]*)` \| .* \| (.*) \|$", text, re.MULTILINE)
    listed = {(package + module) for package, modules in rows for module in modules.split()}
    files = [file.relative_to(ROOT).with_suffix("") for file in (ROOT / "craftcli").rglob("*.py")]
    modules = {str(file) for file in files if not file.name.startswith("__")}
    assert len(modules) > 100
    assert listed == modules


def test_the_readme_is_short() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= 180
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []
