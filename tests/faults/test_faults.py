"""Faults of disks and processes, in short; tests/benchmarks/faults.py does hundreds.

Every fault is one of a series that its seed gives; a failure names the fault.
"""

import json
import random
from pathlib import Path
from types import ModuleType

import pytest
from damage.artefacts import Artefacts, make_artefacts
from damage.files import FileFault, damaged
from damage.full_disk import fill_others, fill_trainings
from damage.kills import KINDS, Training, kill_trainings, train_undisturbed
from damage.readers import damage_files
from damage.tally import Outcome, Tally

SEED = 13
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Artefacts:
    return make_artefacts(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def training(artefacts: Artefacts, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return train_undisturbed(tmp_path_factory.mktemp("killed") / "trainings", artefacts.cache)


@pytest.fixture
def tally() -> Tally:
    return Tally(seed=SEED)


def require_good(tally: Tally) -> None:
    print(tally.line())
    assert tally.bad == []


@pytest.mark.slow
def test_damaged_files_are_found_or_do_no_harm(artefacts: Artefacts, tally: Tally) -> None:
    damage_files(artefacts, 60, tally, random.Random(SEED))
    require_good(tally)
    assert tally.total() == 60
    assert tally.total(Outcome.FOUND) > 30


@pytest.mark.slow
def test_killed_and_interrupted_trainings_end_as_undisturbed_ones(
    training: Training, tally: Tally
) -> None:
    kill_trainings(training, 4, tally, random.Random(SEED), workers=1, period=4)
    require_good(tally)
    alone = {f"{kind}, 0 workers" for kind in KINDS}
    assert tally.rows().keys() == {*alone, "SIGTERM to the group, 1 workers"}


@pytest.mark.slow
def test_a_full_disk_is_explained_and_loses_nothing(
    training: Training, artefacts: Artefacts, tally: Tally, tmp_path: Path
) -> None:
    fill_trainings(training, 1, tally, random.Random(SEED))
    fill_others(artefacts, tmp_path / "others", 3, tally, random.Random(SEED))
    require_good(tally)
    assert tally.total() == 4
    # Otherwise the disk was never full: the write was counted wrongly.
    found = {kind for kind, row in tally.rows().items() if row["found"]}
    assert found == {"full disk: training", "full disk: cache", "full disk: merge"}


def test_damage_leaves_no_trace(tmp_path: Path) -> None:
    """Otherwise one fault would be blamed on the next."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"abcd")
    other.write_bytes(b"efgh")
    seen = []
    for kind, where in (("flip", 9), ("cut", 2), ("zeros", 0), ("delete", 0), ("swap", 0)):
        swapped = other if kind == "swap" else None
        with damaged(FileFault(kind=kind, file=one, where=where, other=swapped)):
            seen.append(one.read_bytes() if one.exists() else None)
        assert (one.read_bytes(), other.read_bytes()) == (b"abcd", b"efgh")
    assert seen == [b"a`cd", b"ab", bytes(4), None, b"efgh"]


def test_the_benchmark_prints_what_it_found(
    artefacts: Artefacts,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import faults

    assert isinstance(faults, ModuleType)
    monkeypatch.setattr(faults, "make_artefacts", lambda _: artefacts)
    few = ("--faults", "6", "--kills", "0", "--fills", "0")
    faults.main(few)
    assert "| all |" in capsys.readouterr().out
    faults.main((*few, "--json"))
    found = json.loads(capsys.readouterr().out)
    assert (found["faults"], found["bad"]) == (6, [])
