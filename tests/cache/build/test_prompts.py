"""Instructions vary by row, and by nothing else."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from craftcli.cache.build.prompts import Prompts, read_prompts
from craftcli.cache.reading.reader import CacheReader
from craftcli.errors import CraftError


def write(folder: Path, text: str) -> Path:
    file = folder / "prompts.txt"
    file.write_text(text)
    return file


def test_without_a_file_the_rows_keep_their_own() -> None:
    prompts = read_prompts(None, seed=0)
    assert prompts.choose("open the door", 3) == "open the door"
    assert prompts.all_for(["a", "b"]) == ["a", "b"]
    assert prompts.digest is None


def test_lines_fill_in_the_task_and_depend_on_the_row_alone(tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path, "please {task}\n\n{task} now\nstop\n"), seed=1)
    assert prompts.lines == ("please {task}", "{task} now", "stop")
    drawn = [prompts.choose("go", row) for row in range(60)]
    assert set(drawn) == {"please go", "go now", "stop"}
    assert drawn == [prompts.choose("go", row) for row in range(60)]
    assert prompts.all_for(["go", "sit"]) == [
        "please go",
        "please sit",
        "go now",
        "sit now",
        "stop",
    ]


def test_other_lines_are_another_digest() -> None:
    assert Prompts(lines=("a",)).digest != Prompts(lines=("b",)).digest


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(CraftError, match="are empty"):
        read_prompts(write(tmp_path, text), seed=0)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CraftError, match="Cannot read the prompts"):
        read_prompts(tmp_path / "nothing.txt", seed=0)


def test_a_cache_stores_the_tokens_of_the_new_instruction(
    build: Callable[..., Path], tmp_path: Path
) -> None:
    """The word for the blue block is one the demo's tokenizer knows."""
    file = write(tmp_path, "reach the blue block")
    plain = CacheReader.open(build(tmp_path / "a.zarr", samples=6))
    varied = CacheReader.open(build(tmp_path / "b.zarr", samples=6, prompts=file))
    assert varied.tasks == ("reach the blue block",)
    assert varied.manifest.prompts_digest is not None
    name = "inputs/observation.language.tokens"
    assert not np.array_equal(plain.read_all(name), varied.read_all(name))
    same = "index/dataset_index"
    assert np.array_equal(plain.read_all(same), varied.read_all(same))
