"""Builds that are killed at random moments and resumed must end in the bytes of an undisturbed one.

    uv run python tests/benchmarks/cache_kill.py --kills 100

Most kills hit a synthetic cache of many small chunks, so that they land in every phase of writing
it; some hit a build of the demo. A third of each is done with two processes; one or both of them
are killed. A write takes less time than the disk needs to confirm it, so that every third process
dies for sure in the middle of one: it stops itself with a part of the file written. Prints how many
kills there were and what was wrong afterwards: nothing, or it fails.
"""

import argparse
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before numpy and torch are imported: a process with threads of its own must not fork.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np

from craftcli.cache.format import Manifest
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.zarr_layout import required_arrays
from craftcli.cache.writing.unfinished import Resumable
from craftcli.cache.writing.writer import CacheWriter
from craftcli.distributed import Processes
from craftcli.policies.identity import DatasetIdentity, TeacherIdentity

type Note = Callable[[int], None]
"""Called with the number of a chunk before that is computed."""
type Build = Callable[[Path, Note], None]

ENDS_WITHIN_S = 120.0
TORCHRUN_WAITS_S = 1.0
# About as many as a process of the synthetic build writes.
MOST_FILES = 250


@dataclass
class Tally:
    """What a series of kills has shown."""

    name: str
    world: int
    """Processes of every build."""
    kills: int = 0
    unfinished: int = 0
    """Kills that left files of a chunk without its record, or a part of a file."""
    in_a_file: int = 0
    """Kills that left a part of a file."""
    builds: int = 0
    differing: list[str] = field(default_factory=list)
    wrong_rows: int = 0
    recomputed: int = 0
    """The most chunks that a killed process had begun and a later one had to do again."""

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.kills} kills of {self.builds} builds ({self.unfinished} inside a "
            f"chunk, {self.in_a_file} of them inside a file), "
            f"files that differ: {len(self.differing)}, wrong rows: {self.wrong_rows}, "
            f"chunks recomputed: max {self.recomputed} per process"
        )


def synthetic(path: Path, note: Note, *, chunks: int = 24) -> None:
    """Build a cache of chunks that are a pure function of their numbers."""
    manifest = Manifest(
        complete=False,
        rows=chunks * 32 - 5,
        rows_per_chunk=32,
        stack="vlm",
        layers=(2, 3),
        layer_count=4,
        pooling="action_tokens",
        vectors=4,
        dim=64,
        dtype="float16",
        packed=("hidden/vlm.3",),
        images="embedded",
        sampling="uniform",
        prompts_digest=None,
        seed=0,
        teacher=TeacherIdentity(
            source="synthetic",
            revision=None,
            policy_type="none",
            weights_digest="w",
            config_digest="c",
            processor_digest="p",
            dtype="float32",
        ),
        dataset=DatasetIdentity(
            repo_id="synthetic",
            root=None,
            revision=None,
            fingerprint="f",
            episodes=1,
            frames=10_000,
            selection_digest="s",
        ),
    )
    arrays = required_arrays(manifest)
    arrays["inputs/image"] = ArraySpec(shape=(3, 64, 64), dtype="uint8")
    processes = Processes.from_environment()
    with (
        processes.connected(),
        CacheWriter.create(
            path,
            manifest,
            arrays,
            tasks=["reach"],
            overwrite=False,
            resumable=Resumable(resume=True, settings={"batch_size": 32}),
            processes=processes,
        ) as writer,
    ):
        for chunk in processes.own(manifest.chunk_count):
            if chunk not in writer.reused:
                note(chunk)
                writer.write_chunk(chunk, synthetic_rows(manifest, arrays, chunk))
        writer.finish()


def synthetic_rows(manifest: Manifest, arrays: dict[str, ArraySpec], chunk: int) -> dict[str, Any]:
    """The rows of one chunk."""
    where = manifest.chunk_rows(chunk)
    count = where.stop - where.start
    rng = np.random.default_rng(chunk)
    rows: dict[str, Any] = {
        name: rng.integers(0, 255, (count, *spec.shape)).astype(spec.dtype)
        for name, spec in arrays.items()
    }
    rows["hidden/vlm.3"][::2] = 0
    rows["index/dataset_index"] = np.arange(where.start, where.stop)
    rows["index/task"] = np.zeros(count, np.int64)
    rows["valid"] = np.ones(count, bool)
    return rows


def demo_build() -> Build:
    """A build of the demo's cache; policy and data are opened here, before any fork."""
    from craftcli.cache.build.build import build_cache
    from craftcli.cache.build.teacher import TeacherRows
    from craftcli.choices import Images
    from craftcli.cli.quiet import quiet_libraries
    from craftcli.config.cache import CacheConfig
    from craftcli.sources import open_anchor_data, open_policy

    quiet_libraries(debug=False)
    settings: dict[str, Any] = {"samples": 96, "kind": "hidden", "device": "cpu", "batch_size": 8}
    # Eight rows of the widest array: hidden states of 11 vectors in 64 float32.
    settings |= {"images": Images.REFERENCE, "chunk_mib": 8 * 11 * 64 * 4 / 2**20}
    teacher = open_policy(CacheConfig(**settings))
    dataset = open_anchor_data(CacheConfig(**settings), teacher)
    prepare = TeacherRows.prepare

    def build(path: Path, note: Note) -> None:
        def noted(self: TeacherRows, rows: Sequence[int]) -> Any:
            # A single row is only looked at to learn the shapes.
            if len(rows) > 1:
                note(rows[0])
            return prepare(self, rows)

        TeacherRows.prepare = noted  # type: ignore[method-assign]
        config = CacheConfig(**settings, output=path, resume=True)
        build_cache(config, teacher, dataset, on_plan=lambda _: None, on_rows=lambda _: None)

    return build


@dataclass(frozen=True, kw_only=True)
class Death:
    """That a process is to kill itself when it has written a share of its n-th file."""

    rank: int
    file: int
    share: float

    def arm(self) -> None:
        """Zarr writes a file under a temporary name and then renames it."""
        rename, seen = Path.replace, [0]

        def die_or_rename(file: Path, target: Path) -> Path:
            seen[0] += 1
            if seen[0] == self.file:
                os.truncate(file, int(file.stat().st_size * self.share))
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(file, target)

        Path.replace = die_or_rename  # type: ignore[method-assign,assignment]


def start(
    build: Build, path: Path, logs: Path, world: int, death: Death | None = None
) -> list[int]:
    """Fork the processes of one build; what they begin is in `logs`, a file for each."""
    logs.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if death and death.rank == rank:
                death.arm()
            run_and_exit(build, path, logs / str(rank))
        started.append(pid)
    return started


def run_and_exit(build: Build, path: Path, log: Path) -> None:
    """In a forked process: build, then end without the parent's clean-up."""
    code = 1

    def note(chunk: int) -> None:
        os.write(file, f"{chunk}\n".encode())

    try:
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        # The error of a process whose fellow was killed is expected, and said in the exit code.
        with (log.parent / f"{log.name}.err").open("w") as errors:
            os.dup2(errors.fileno(), 2)
        build(path, note)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def await_end(pids: list[int], within_s: float) -> dict[int, int]:
    """Exit codes of the processes that end in time."""
    codes: dict[int, int] = {}
    until = time.monotonic() + within_s
    while len(codes) < len(pids):
        for pid in pids:
            ended, status = (0, 0) if pid in codes else os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            break
        time.sleep(0.001)
    return codes


def end_some(pids: list[int], dice: random.Random) -> None:
    """Kill one process or all."""
    for pid in pids if dice.random() < 0.5 else [dice.choice(pids)]:
        os.kill(pid, signal.SIGKILL)


def end_all(pids: list[int]) -> dict[int, int]:
    """After one was killed, end the others as torchrun does; the exit codes."""
    codes = await_end(pids, TORCHRUN_WAITS_S)
    left = [pid for pid in pids if pid not in codes]
    for pid in left:
        os.kill(pid, signal.SIGTERM)
    codes |= await_end(left, ENDS_WITHIN_S)
    if len(codes) < len(pids):
        sys.exit("A process does not end after its fellow was killed.")
    return codes


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below, with its content."""
    return {
        str(entry.relative_to(folder)): entry.read_bytes() if entry.is_file() else None
        for entry in folder.rglob("*")
    }


def note_damage(partial: Path, tally: Tally) -> None:
    """Count a kill by what it left."""
    files = [entry for entry in partial.rglob("c/*") if entry.parent.name == "c"]
    recorded = {entry.name for entry in files if entry.parent.parent.name == "commit"}
    rows = [entry for entry in files if "stats" not in entry.parts and entry.name.isdigit()]
    half = any(entry.is_file() for entry in partial.rglob("*.partial"))
    tally.kills += 1
    tally.in_a_file += half
    tally.unfinished += half or any(entry.name not in recorded for entry in rows)


def wrong_rows(path: Path, reference: Path) -> int:
    """Rows that differ from the undisturbed build's in any array."""
    from craftcli.cache.reading.reader import CacheReader

    ours, theirs = CacheReader.open(path), CacheReader.open(reference)
    wrong = np.zeros(theirs.manifest.rows, bool)
    for name in theirs.array_names():
        differs = ours.read_all(name) != theirs.read_all(name)
        wrong |= differs.reshape(len(wrong), -1).any(axis=1)
    return int(wrong.sum())


def logged(logs: Path) -> Iterator[list[str]]:
    """The chunks that each process of a run began."""
    for log in sorted(logs.iterdir()):
        if log.suffix != ".err":
            yield log.read_text().split()


def build_with_kills(
    build: Build, path: Path, dice: random.Random, tally: Tally, *, lasts_s: float, most: int
) -> None:
    """Build, and while there are kills left kill it at a random moment and resume it."""
    runs: list[Path] = []
    while not path.exists():
        runs.append(path.with_name(f"run{len(runs)}"))
        spared = tally.kills >= most
        file = dice.randint(1, MOST_FILES)
        death = Death(rank=dice.randrange(tally.world), file=file, share=dice.random())
        inside = not spared and dice.random() < 1 / 3
        pids = start(build, path, runs[-1], tally.world, death if inside else None)
        codes = await_end(pids, ENDS_WITHIN_S if spared or inside else dice.uniform(0, lasts_s))
        running = [pid for pid in pids if pid not in codes]
        if running and not inside:
            end_some(running, dice)
        codes |= end_all(running)
        if -signal.SIGKILL in codes.values():
            note_damage(path.with_name(f"{path.name}.partial"), tally)
        elif any(codes.values()):
            sys.exit("\n".join(file.read_text() for file in runs[-1].glob("*.err")))
    tally.builds += 1
    for number, run in enumerate(runs):
        later = {chunk for other in runs[number + 1 :] for log in logged(other) for chunk in log}
        for chunks in logged(run):
            tally.recomputed = max(tally.recomputed, len(later.intersection(chunks)))


def undisturbed(build: Build, path: Path, world: int) -> float:
    """Build without kills; how long it takes, in seconds."""
    path.parent.mkdir()
    logs = path.with_name("run0")
    began = time.monotonic()
    codes = await_end(start(build, path, logs, world), ENDS_WITHIN_S)
    if len(codes) < world or any(codes.values()):
        sys.exit("\n".join(file.read_text() for file in logs.glob("*.err")))
    return time.monotonic() - began


def differing(folder: Path, reference: Path) -> list[str]:
    """What is only in one of two folders, or not the same in both."""
    ours, theirs = tree(folder), tree(reference)
    absent = b"absent"
    names = sorted(ours.keys() | theirs.keys())
    return [name for name in names if ours.get(name, absent) != theirs.get(name, absent)]


def series(name: str, build: Build, world: int, kills: int, dice: random.Random) -> Tally:
    """Builds with that many kills in all, each compared with an undisturbed one of one process."""
    tally = Tally(name=name, world=world)
    with tempfile.TemporaryDirectory() as scratch:
        reference = Path(scratch) / "undisturbed" / "a.zarr"
        lasts_s = undisturbed(build, reference, 1)
        if world > 1:
            shared = Path(scratch) / "shared" / "a.zarr"
            lasts_s = undisturbed(build, shared, world)
            tally.differing += differing(shared, reference)
        while tally.kills < kills:
            path = Path(scratch) / str(tally.builds) / "a.zarr"
            path.parent.mkdir()
            build_with_kills(build, path, dice, tally, lasts_s=lasts_s, most=kills)
            found = differing(path, reference)
            if found:
                tally.differing += found
                tally.wrong_rows += wrong_rows(path, reference)
            shutil.rmtree(path.parent)
    print(tally, flush=True)
    return tally


def main() -> None:
    """Kill and resume; print the figures and fail if anything was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100, help="all kills together")
    parser.add_argument("--demo-kills", type=int, default=10, help="those of the demo's build")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    dice = random.Random(given.seed)
    # In the parent, so that forked processes need not import it.
    import torch.distributed  # noqa: F401

    shares: dict[str, tuple[Build, int]] = {
        "synthetic": (synthetic, given.kills - given.demo_kills)
    }
    if given.demo_kills:
        shares["demo"] = (demo_build(), given.demo_kills)
    tallies = [
        series(f"{name}, {world} process{'es' * (world > 1)}", build, world, part, dice)
        for name, (build, kills) in shares.items()
        for world, part in ((1, kills - kills // 3), (2, kills // 3))
        if part
    ]
    wrong = sum(len(tally.differing) + tally.wrong_rows for tally in tallies)
    recomputed = max(tally.recomputed for tally in tallies)
    print(
        f"{sum(tally.kills for tally in tallies)} kills, "
        f"wrong rows: {sum(tally.wrong_rows for tally in tallies)}, "
        f"chunks recomputed: max {recomputed} per process"
    )
    sys.exit(bool(wrong) or recomputed > 1)


if __name__ == "__main__":
    main()
