"""Reads the commands and programs out of the README and the pages under `examples/`."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
INDEX = ROOT / "examples/README.md"
PAGES = sorted((ROOT / "examples/pages").glob("*.md"))
OTHERS = sorted((ROOT / "examples").glob("*/README.md"))
FOR_ENGINEERS = sorted((ROOT / ".github").glob("*.md"))
EVERY_PAGE = (README, INDEX, *PAGES, *OTHERS, *FOR_ENGINEERS)

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language and its text."""

    language: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a shell block, each as its words."""
        joined = self.text.replace("\\\n", " ")
        lines = [part for line in joined.splitlines() for part in line.split(" && ")]
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for language, text in _BLOCK.findall(page.read_text("utf-8")):
        yield Block(language, text)


def craft_arguments(words: list[str]) -> list[str] | None:
    """The arguments for craft in a command; None if the command runs something else."""
    if words[:2] == ["uv", "run"]:
        words = words[2:]
    if words[0] == "craft":
        return words[1:]
    if "craftcli" in words:
        return words[words.index("craftcli") + 1 :]
    return None
