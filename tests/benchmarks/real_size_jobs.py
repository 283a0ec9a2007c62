"""The parts of `real_size.py` that have a process of their own; each prints JSON."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from default_step import Bench
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from real_policies import SIZES

from craftcli.config.parsing import parse_lora
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.run import open_run, prepare
from craftcli.policies.families.registry import adapter_for
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.lora import add_lora
from craftcli.policies.lerobot.processor_files import open_processors
from craftcli.sources import open_task_data
from craftcli.system.memory import peak_bytes, reset_peak

_WORLD = "world.json"


def make(name: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Make the policy and its data."""
    size = SIZES[name]
    world = size.make_quick(folder) if quick else size.make(folder)
    made = {
        "policy": str(world.policy),
        "dataset": world.dataset,
        "batch": size.batch,
        "anchors": size.anchors,
        "lora": size.lora,
        "rounds": size.rounds,
        "build": size.build,
        "own_tokenizers": size.own_tokenizers,
    }
    (folder / _WORLD).write_text(json.dumps(made), encoding="utf-8")
    return made


def load(name: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Load the policy with craft."""
    made = _made(folder)
    found, took = _measured(lambda: load_checkpoint(made["policy"], device="cpu"))
    parameters = list(found.policy.parameters())
    return {
        **took,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "weights": sum(parameter.nbytes for parameter in parameters),
    }


def lerobot(name: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Load the policy with LeRobot alone, and take steps with it."""
    made = _made(folder)
    student, took = _measured(lambda: _lerobots(Path(made["policy"])))
    if made["lora"]:
        student = add_lora(student, parse_lora(made["lora"]), seed=0)
    bench = _bench(student, made, folder)
    for _ in range(made["rounds"]):
        bench.lerobot()
    return {**took, "peak": peak_bytes()}


def craft(name: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Check what a run checks before its first step, then take steps of both kinds in turn."""
    made = _made(folder)
    config = TrainConfig(
        policy=made["policy"],
        dataset=made["dataset"],
        cache=folder / "anchors.zarr",
        batch_size=made["batch"],
        lora=made["lora"],
        device="cpu",
        output=folder / "checked",
    )
    run = open_run(config, {"cache": config.cache}, Processes())
    assert run.terms is not None
    began = time.process_time()
    prepare(run, run.terms)
    start_s = time.process_time() - began
    bench = _bench(run.student, made, folder)
    ours, _ = bench.craft()
    ways: dict[str, Callable[[], None]] = {"lerobot_s": bench.lerobot, "craft_s": ours}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1 + made["rounds"]):
        for way, step in ways.items():
            began = time.process_time()
            step()
            if number:  # the first makes the optimizer's state
                found[way].append(time.process_time() - began)
    return {**found, "start_s": start_s}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "make": make,
    "load": load,
    "lerobot": lerobot,
    "craft": craft,
}


def _made(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((folder / _WORLD).read_text("utf-8"))
    return made


def _measured[T](open_policy: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """What was opened, the processor time that it took, and its peak of memory."""
    reset_peak()
    before, began = peak_bytes(), time.process_time()
    opened = open_policy()
    took = time.process_time() - began
    return opened, {"load_s": took, "load_memory": max(peak_bytes() - before, 1)}


def _lerobots(folder: Path) -> Checkpoint:
    """The policy as LeRobot loads it."""
    config = PreTrainedConfig.from_pretrained(str(folder))
    config.device = "cpu"
    config.pretrained_path = str(folder)
    policy = get_policy_class(config.type).from_pretrained(str(folder), config=config)
    adapter = adapter_for(config.type)
    preprocess, postprocess = open_processors(folder, config, adapter)
    return Checkpoint(
        policy=policy,
        preprocess=preprocess,
        postprocess=postprocess,
        adapter=adapter,
        folder=folder,
        source=str(folder),
        revision=None,
    )


def _bench(student: Checkpoint, made: dict[str, Any], folder: Path) -> Bench:
    data = open_task_data(TrainConfig(policy=made["policy"], dataset=made["dataset"]), student)
    return Bench(student, None, data, made["batch"], folder)


if __name__ == "__main__":
    job, name, folder = sys.argv[1:4]
    print(json.dumps(JOBS[job](name, Path(folder), quick=False)))
