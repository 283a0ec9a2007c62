"""Faults of disks and processes, in short; tests/benchmarks/faults.py does hundreds.

Every run tries other faults. Its seed stands at the end of the report, and with a failure; with
CRAFT_FAULT_SEED=<seed> the same faults are tried again.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from damage.artefacts import Artefacts, make_artefacts
from damage.commands import kill_commands
from damage.files import FileFault, damaged
from damage.full_disk import fill_others, fill_trainings
from damage.kills import KINDS, Training, kill_trainings, train_undisturbed
from damage.moments import HungError, Moment, craft_in_child
from damage.readers import damage_files
from damage.tally import SEED_VARIABLE, Outcome, Tally, draw_seed

SEED = draw_seed(os.environ)
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Artefacts:
    return make_artefacts(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def training(artefacts: Artefacts, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return train_undisturbed(tmp_path_factory.mktemp("killed") / "trainings", artefacts.cache)


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Iterator[Tally]:
    tally = Tally(seed=SEED)
    yield tally
    record_property("faults", tally.line())
    record_property("faults", f"the same again: {tally.again()}")


def require_good(tally: Tally) -> None:
    assert tally.bad == [], f"to see it again: {tally.again()}"


@pytest.mark.slow
def test_damaged_files_are_found_or_do_no_harm(artefacts: Artefacts, tally: Tally) -> None:
    damage_files(artefacts, 60, tally, random.Random(SEED))
    require_good(tally)
    assert tally.total() == 60
    assert tally.total(Outcome.FOUND) > 20
    damaged_things = {kind.partition(": ")[0] for kind in tally.rows()}
    assert {"cache", "run", "sweep", "LoRA run", "data of a run"} <= damaged_things


@pytest.mark.slow
def test_killed_and_interrupted_trainings_end_as_undisturbed_ones(
    training: Training, tally: Tally
) -> None:
    kill_trainings(training, 4, tally, random.Random(SEED), workers=1, period=4)
    require_good(tally)
    alone = {f"{kind}, 0 workers" for kind in KINDS}
    assert tally.rows().keys() == {*alone, "SIGTERM to the group, 1 workers"}


@pytest.mark.slow
def test_killed_merges_evaluations_and_sweeps_are_done_again(
    artefacts: Artefacts, tally: Tally, tmp_path: Path
) -> None:
    kill_commands(artefacts, tmp_path / "killed", 3, tally, random.Random(SEED))
    require_good(tally)
    assert {kind.partition(": ")[2] for kind in tally.rows()} == {"merge", "evaluation", "sweep"}


@pytest.mark.slow
def test_a_full_disk_is_explained_and_loses_nothing(
    training: Training,
    artefacts: Artefacts,
    tally: Tally,
    tmp_path: Path,
) -> None:
    fill_trainings(training, 1, tally, random.Random(SEED))
    fill_others(artefacts, tmp_path / "others", 3, tally, random.Random(SEED))
    require_good(tally)
    assert tally.total() == 4
    # Otherwise the disk was never full: the write was counted wrongly.
    found = {kind for kind, row in tally.rows().items() if row["found"]}
    assert found == {"full disk: training", "full disk: cache", "full disk: merge"}


def test_a_command_that_hangs_fails_the_test(tmp_path: Path) -> None:
    """Otherwise CI would wait for it for hours."""
    hang = Moment(folder=tmp_path, number=1, act=lambda event, after: time.sleep(1000))
    build = ("cache", "build", "--samples", "4", "--device", "cpu", "-o", tmp_path / "a.zarr")
    began = time.monotonic()
    with pytest.raises(HungError, match=r"craft cache build .* did not end within 0.5 s"):
        craft_in_child(tmp_path / "log", *build, moment=hang, within_s=0.5)
    assert time.monotonic() - began < 60


def test_the_seed_is_new_unless_it_is_given() -> None:
    assert draw_seed({SEED_VARIABLE: "7"}) == 7
    assert len({draw_seed({}) for _ in range(5)}) > 1
    assert Tally(seed=7).again() == "CRAFT_FAULT_SEED=7 pytest -n0 tests/faults"


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
    few = ("--faults", "6", "--kills", "0", "--commands", "0", "--fills", "0")
    faults.main(few)
    assert "| all |" in capsys.readouterr().out
    faults.main((*few, "--json"))
    found = json.loads(capsys.readouterr().out)
    assert (found["faults"], found["bad"]) == (6, [])
