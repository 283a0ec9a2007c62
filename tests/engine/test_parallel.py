"""Several processes, or several batches to a step, give what one process with one batch gives."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny.act import policy as tiny_act
from tiny.processes import together
from tiny.world import save, write_dataset

from craftcli.cache.build.build import build_cache
from craftcli.config.cache import CacheConfig
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.run import open_run
from craftcli.errors import CraftError
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset

STEPS = 10


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A policy without anything random in training, its data, and a cache of both."""
    folder = tmp_path_factory.mktemp("parallel")
    # Single actions: with chunks, LeRobot weighs a batch by how many of them are padding.
    save(folder / "policy", tiny_act(cameras=0, chunk=1, dropout=0.0, use_vae=False))
    write_dataset(folder / "data")
    paths: dict[str, Any] = {"policy": str(folder / "policy"), "dataset": str(folder / "data")}
    config = CacheConfig(
        **paths, output=folder / "a.zarr", samples=16, kind="hidden+action", device="cpu"
    )
    teacher = load_checkpoint(paths["policy"], device="cpu")
    data = open_dataset(paths["dataset"], root=None, policy_config=teacher.policy.config)
    build_cache(config, teacher, data, on_plan=lambda _: None, on_rows=lambda _: None)
    return {**paths, "cache": str(folder / "a.zarr")}


def settings(world: dict[str, str], output: Path, **changed: Any) -> TrainConfig:
    fixed = {"steps": STEPS, "save_every": 0, "log_every": 1, "lr": 2e-4, "device": "cpu"}
    fixed |= {"mode": "hidden+action", "epsilon_start": 0.001, "lambda_lr": 0.004, "seed": 3}
    # Below 1, where the size of the gradients does not bound λ.
    fixed |= {"lambda_init": 0.2}
    paths = {**world, "cache": Path(world["cache"]), "output": output}
    return TrainConfig(**{**fixed, **paths, **changed})


def train(config: TrainConfig, into: Path) -> None:
    """Run, and keep what every step saw and what the weights became."""
    processes = Processes.from_environment()
    with processes.connected():
        reports: list[Any] = []
        trainer = open_run(config, {}, processes).trainer()
        trainer.run(lambda _: reports.append(trainer.last_report), *[lambda _: None] * 2)
        into.write_text(json.dumps([_figures(report) for report in reports]))


def _figures(report: Any) -> dict[str, float]:
    seen = report.retention
    figures = {"loss": report.loss, "norm": report.grad_norm, "l_ret": seen.loss, "dot": seen.dot}
    if seen.held_out is not None:
        figures["l_held"] = seen.held_out
    return {**figures, "cos": seen.cos, "lam": seen.lam, **seen.losses}


def train_together(config: TrainConfig, into: Path) -> list[list[dict[str, float]]]:
    """The same in two processes; what each of them saw."""
    together(lambda: train(config, into.with_suffix(f".{os.environ['RANK']}")))
    return [json.loads(into.with_suffix(f".{rank}").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone(world: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """One process, a batch of 8 and 8 anchors."""
    folder = tmp_path_factory.mktemp("alone")
    train(settings(world, folder / "run", batch_size=8, anchor_batch_size=8), folder / "figures")
    return json.loads((folder / "figures").read_text()), final_weights(folder / "run")


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints/last/pretrained_model/model.safetensors")


def assert_alike(
    figures: list[dict[str, float]], weights: Any, alone: tuple[Any, Any], *, atol: float = 2e-5
) -> None:
    expected, expected_weights = alone
    assert len({round(entry["lam"], 3) for entry in expected}) > 3  # λ really moves
    for number, (one, other) in enumerate(zip(figures, expected, strict=True)):
        for name in one:
            if number == 0 and name in ("dot", "cos"):
                continue  # at the teacher's weights the retention gradient is rounding alone
            if other[name] is None:  # a step of one backward pass
                assert one[name] is None
                continue
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=1e-6), (number, name)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected_weights[name], rtol=1e-3, atol=atol)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_equal_one_with_twice_the_batch(
    world: dict[str, str], alone: tuple[Any, Any], tmp_path: Path, parallel: str
) -> None:
    config = settings(world, tmp_path / "run", batch_size=4, anchor_batch_size=4, parallel=parallel)
    first, second = train_together(config, tmp_path / "figures")
    assert first == second  # to the last bit, λ with them
    assert_alike(first, final_weights(tmp_path / "run"), alone)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_measure_held_out_anchors_as_one_does(
    world: dict[str, str], tmp_path: Path, parallel: str
) -> None:
    paths: dict[str, Any] = {"policy": world["policy"], "dataset": world["dataset"]}
    wide = {**world, "cache": str(tmp_path / "wide.zarr")}
    config = CacheConfig(**paths, output=tmp_path / "wide.zarr", samples=16, augment=3)
    teacher = load_checkpoint(paths["policy"], device="cpu")
    data = open_dataset(paths["dataset"], root=None, policy_config=teacher.policy.config)
    build_cache(config, teacher, data, on_plan=lambda _: None, on_rows=lambda _: None)
    held: dict[str, Any] = {"steps": 12, "held_out_share": 0.25}
    one = settings(wide, tmp_path / "one", batch_size=8, anchor_batch_size=8, **held)
    train(one, tmp_path / "alone")
    alone = json.loads((tmp_path / "alone").read_text())
    assert [n for n, entry in enumerate(alone) if "l_held" in entry] == [0, 10]
    assert alone[10]["l_held"] > 1e-4
    two = settings(
        wide, tmp_path / "two", batch_size=4, anchor_batch_size=4, parallel=parallel, **held
    )
    first, second = train_together(two, tmp_path / "figures")
    assert first == second
    assert_alike(first, final_weights(tmp_path / "two"), (alone, final_weights(tmp_path / "one")))


def test_accumulating_two_batches_equals_one_of_twice_the_size(
    world: dict[str, str], alone: tuple[Any, Any], tmp_path: Path
) -> None:
    """Pitfall 15: every batch counts, and λ moves once a step."""
    config = settings(world, tmp_path / "run", batch_size=4, anchor_batch_size=4, grad_accum=2)
    train(config, tmp_path / "figures")
    assert_alike(
        json.loads((tmp_path / "figures").read_text()), final_weights(tmp_path / "run"), alone
    )


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_steps_of_one_backward_pass_are_alike_too(
    world: dict[str, str], tmp_path: Path, parallel: str
) -> None:
    """With a budget that holds, steps 11 to 13 join task and anchors in one pass."""
    # λ falls while the budget holds; a large step of it shows that in few turns.
    wide: dict[str, Any] = {"steps": 13, "epsilon_start": 10.0, "lambda_lr": 0.4}
    train(
        settings(world, tmp_path / "one", batch_size=8, anchor_batch_size=8, **wide), tmp_path / "f"
    )
    alone = json.loads((tmp_path / "f").read_text())
    assert [n for n, entry in enumerate(alone) if entry["dot"] is None] == [10, 11, 12]
    two = settings(
        world, tmp_path / "two", batch_size=4, anchor_batch_size=4, parallel=parallel, **wide
    )
    first, second = train_together(two, tmp_path / "figures")
    assert first == second
    # Adam turns the rounding of a gradient near 0 into half a step of 2e-4.
    whole = (alone, final_weights(tmp_path / "one"))
    assert_alike(first, final_weights(tmp_path / "two"), whole, atol=1e-4)


def test_one_backward_pass_is_one_reduction(world: dict[str, str], tmp_path: Path) -> None:
    wide: dict[str, Any] = {"steps": 12, "epsilon_start": 10.0, "log_every": 12}
    config = settings(world, tmp_path / "run", batch_size=4, anchor_batch_size=4, **wide)

    def work() -> None:
        processes = Processes.from_environment()
        with processes.connected():
            trainer = open_run(config, {}, processes).trainer()
            counts: list[int] = []
            student: Any = trainer.execution.student
            student.register_comm_hook(counts, _counted_reduction)
            seen = [len(counts) for _ in trainer.steps()]
            (tmp_path / f"seen-{os.environ['RANK']}").write_text(json.dumps(seen))

    together(work)
    seen = json.loads((tmp_path / "seen-0").read_text())
    steps = [after - before for before, after in zip([0, *seen], seen, strict=False)]
    # Two buckets at first, until DDP has put the gradients in the order in which they come.
    assert steps[9] == 2
    assert steps[10:] == [1, 1]


def _counted_reduction(
    counts: list[int],
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch checks this name
) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    counts.append(bucket.index())
    assert dist.group.WORLD is not None
    return allreduce_hook(dist.group.WORLD, bucket)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_resume_where_they_were(
    world: dict[str, str], tmp_path: Path, parallel: str
) -> None:
    small = {"batch_size": 4, "anchor_batch_size": 4, "parallel": parallel, "grad_accum": 2}
    whole = train_together(settings(world, tmp_path / "whole", **small), tmp_path / "f")
    short = settings(world, tmp_path / "part", **small, save_every=4)
    train_together(short, tmp_path / "g")
    last = tmp_path / "part/checkpoints/last"
    last.unlink()
    last.symlink_to("000004")
    rest = train_together(TrainConfig(resume=tmp_path / "part"), tmp_path / "h")
    assert rest[0] == whole[0][4:]
    weights = final_weights(tmp_path / "part")
    for name, tensor in final_weights(tmp_path / "whole").items():
        assert torch.equal(weights[name], tensor), name


def test_another_number_of_processes_shares_the_batches_anew(
    world: dict[str, str], alone: tuple[Any, Any], tmp_path: Path
) -> None:
    config = settings(world, tmp_path / "run", batch_size=4, anchor_batch_size=4, save_every=4)
    first, _ = train_together(config, tmp_path / "f")
    last = tmp_path / "run/checkpoints/last"
    last.unlink()
    last.symlink_to("000004")
    train(TrainConfig(resume=tmp_path / "run"), tmp_path / "rest")
    rest = json.loads((tmp_path / "rest").read_text())
    assert_alike(first[:4] + rest, final_weights(tmp_path / "run"), alone)
    # A second time, with the same number: the sizes are those of the checkpoint's own processes.
    last.unlink()
    last.symlink_to("000008")
    train(TrainConfig(resume=tmp_path / "run"), tmp_path / "again")
    again = json.loads((tmp_path / "again").read_text())
    assert again == rest[4:]
    assert_alike(first[:4] + rest[:4] + again, final_weights(tmp_path / "run"), alone)
    sizes = json.loads((last / "craft_config.json").read_text())
    assert (sizes["batch_size"], sizes["anchor_batch_size"]) == (8, 8)


def test_a_process_that_loses_the_other_says_so(world: dict[str, str], tmp_path: Path) -> None:
    """The other is killed in a step, so that the connection breaks in the middle of an exchange."""
    config = settings(world, tmp_path / "run", batch_size=4, anchor_batch_size=4)

    def work() -> None:
        processes = Processes.from_environment()
        said = tmp_path / "said"
        try:
            with processes.connected():
                trainer = open_run(config, {}, processes).trainer()
                if processes.rank == 1:
                    trainer.student.policy.register_forward_pre_hook(end_in_third)
                trainer.run(*[lambda _: None] * 3)
        except CraftError as error:
            said.write_text(str(error))

    calls = []

    def end_in_third(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            os._exit(0)

    together(work)
    assert (
        "Process 0 of 2 stops, because another one has stopped" in (tmp_path / "said").read_text()
    )
