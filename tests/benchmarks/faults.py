"""Random faults of disks and processes: none may be silent, unexplained, or lose anything.

    uv run python tests/benchmarks/faults.py --faults 600 --seed 1

Damages the files of a small run, a cache and a sweep one at a time (flipped bits, cut, zeroed,
deleted and swapped files) and reads them again with `craft inspect`, `cache inspect --verify`,
`compare`, `eval` and the check of `train --resume`. Kills and interrupts trainings at random
writes, with and without workers, and resumes them; kills merges, evaluations and sweeps, and does
them again; fills the disk under trainings, builds and merges. Prints a table of the outcomes, and
fails if there was a bad one.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Before torch is imported: a process with threads of its own must not fork.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from damage.artefacts import Artefacts, make_artefacts
from damage.commands import kill_commands
from damage.full_disk import fill_others, fill_trainings
from damage.kills import kill_trainings, train_undisturbed
from damage.readers import damage_files
from damage.tally import Tally


def run_faults(
    artefacts: Artefacts,
    folder: Path,
    *,
    faults: int,
    kills: int,
    commands: int,
    fills: int,
    seed: int,
) -> Tally:
    """All faults: `kills` of trainings, `commands` of others, `fills` of disks, the rest of files.

    Files come first: a series with fewer of the others damages the same ones.
    """
    tally, dice = Tally(seed=seed), random.Random(seed)
    damage_files(artefacts, faults - kills - commands - fills, tally, dice)
    if kills or fills:
        training = train_undisturbed(folder / "trainings", artefacts.cache)
        kill_trainings(training, kills, tally, dice)
        fill_trainings(training, fills // 2, tally, dice)
    if fills:
        fill_others(artefacts, folder / "others", fills - fills // 2, tally, dice)
    if commands:
        kill_commands(artefacts, folder / "commands", commands, tally, dice)
    return tally


def main(arguments: Sequence[str] | None = None) -> None:
    """Do faults and print what became of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=600, help="all faults together")
    parser.add_argument("--kills", type=int, default=24, help="those that end a training")
    parser.add_argument("--commands", type=int, default=9, help="those that end another command")
    parser.add_argument("--fills", type=int, default=16, help="those that fill the disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    given = parser.parse_args(arguments)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tally = run_faults(
            make_artefacts(folder / "made"),
            folder,
            faults=given.faults,
            kills=given.kills,
            commands=given.commands,
            fills=given.fills,
            seed=given.seed,
        )
    if given.json:
        print(json.dumps(tally.to_json(), indent=2))
    else:
        print(tally.table())
        print(f"{tally.line()}; {time.process_time() - began:.0f} s of processor time")
    if tally.bad:
        sys.exit("\n".join(tally.bad))


if __name__ == "__main__":
    main()
