"""The best measurement of a run, early stopping, and which checkpoints stay."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from craftcli.distributed import Processes
from craftcli.engine.checkpoint_manifest import CheckpointManifest, digest_files
from craftcli.engine.kept_checkpoints import point_to_best, remove_older
from craftcli.engine.watch import Figures, Watch, undisturbed


def watch_of(*figures: Figures, patience: int = 0) -> Watch:
    """A watch that measures these figures, one after the other, at every step."""
    left = iter(figures)
    return Watch(
        lambda: next(left), nn.Linear(1, 1), every=1, patience=patience, processes=Processes()
    )


def best_of(*figures: Figures, epsilon: float = 0.1) -> int | None:
    watch = watch_of(*figures)
    watch.measure_start()
    for step in range(1, len(figures)):
        watch.measure(step, epsilon=epsilon)
    return watch.best_step


def test_within_the_budget_the_lowest_loss_of_the_new_task_is_best() -> None:
    kept = [Figures(old_loss=old, new_loss=new) for old, new in ((0, 9), (0.1, 5), (0.09, 6))]
    assert best_of(*kept, Figures(old_loss=0.11, new_loss=1)) == 1


def test_if_no_measurement_is_within_the_budget_the_nearest_is_best() -> None:
    lost = [Figures(old_loss=old, new_loss=new) for old, new in ((0.5, 1), (0.3, 2), (0.4, 0))]
    assert best_of(Figures(old_loss=0, new_loss=9), *lost) == 2


def test_in_closed_loop_old_success_is_kept_if_95_percent_of_the_start_is_left() -> None:
    start = Figures(old_success=1.0, new_success=0.0, old_loss=0.0, new_loss=9.0)
    kept = Figures(old_success=0.95, new_success=0.4, old_loss=9.0, new_loss=1.0)
    lost = Figures(old_success=0.94, new_success=1.0, old_loss=0.0, new_loss=0.0)
    more = Figures(old_success=1.0, new_success=0.5, old_loss=9.0, new_loss=2.0)
    assert best_of(start, kept, lost) == 1
    assert best_of(start, kept, lost, more) == 3
    # As many successes: the lower loss decides.
    assert best_of(start, more, Figures(old_success=1.0, new_success=0.5, new_loss=1.9)) == 2


def test_the_first_of_equals_stays_best_and_what_is_not_finite_is_worst() -> None:
    same = Figures(old_loss=0.0, new_loss=1.0)
    assert best_of(same, same, same) == 1
    assert best_of(same, Figures(old_loss=0.0, new_loss=float("nan")), same) == 2
    assert best_of(Figures(new_loss=3), Figures(new_loss=2), Figures(new_loss=1)) == 2


def test_it_stops_after_measurements_that_were_no_better_and_continues_from_its_state() -> None:
    losses = [Figures(new_loss=loss) for loss in (9, 5, 6, 4, 5, 5)]
    watch = watch_of(*losses, patience=2)
    watch.measure_start()
    seen = []
    for step in range(1, 5):
        watch.measure(step, epsilon=1)
        seen.append(watch.exhausted)
    assert seen == [False] * 4
    resumed = watch_of(losses[-1], patience=2)
    resumed.load_state_dict(watch.state_dict())
    resumed.measure(5, epsilon=1)
    assert resumed.exhausted
    assert resumed.best_step == 3
    resumed.extend()
    assert not resumed.exhausted


def test_what_is_due() -> None:
    watch = Watch(lambda: Figures(), nn.Linear(1, 1), every=4, patience=0, processes=Processes())
    assert [step for step in range(1, 11) if watch.due(step, last=10)] == [4, 8, 10]
    never = Watch(None, nn.Linear(1, 1), every=0, patience=3, processes=Processes())
    assert not any(never.due(step, last=10) for step in range(1, 11))
    assert not never.exhausted
    with pytest.raises(ValueError, match="needs an evaluator"):
        Watch(None, nn.Linear(1, 1), every=4, patience=0, processes=Processes())


def test_measuring_leaves_no_trace() -> None:
    policy = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    policy[2].eval()
    buffers = [buffer.clone() for buffer in policy.buffers()]

    def draws() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with undisturbed(policy):
        assert not policy.training
        policy.train()
        policy(torch.randn(4, 2))
        draws()
    seen = draws()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    assert seen == draws()
    assert [policy.training, policy[0].training, policy[2].training] == [True, True, False]
    assert all(map(torch.equal, buffers, policy.buffers()))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with four checkpoints of craft's and one of LeRobot's."""
    for step in (2, 4, 6, 8):
        folder = tmp_path / f"checkpoints/{step:06}"
        (folder / "pretrained_model").mkdir(parents=True)
        (folder / "pretrained_model/model.safetensors").write_text(str(step))
        CheckpointManifest(files=digest_files(folder)).write(folder)
    (tmp_path / "checkpoints/000005/pretrained_model").mkdir(parents=True)
    (tmp_path / "checkpoints/last").symlink_to("000008")
    return tmp_path


def there(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "checkpoints").iterdir())


def test_the_last_the_best_and_what_craft_did_not_write_stay(run: Path) -> None:
    assert point_to_best(run, 4) == run / "checkpoints/000004"
    removed = remove_older(run, keep=1)
    assert [folder.name for folder in removed] == ["000002", "000006"]
    assert there(run) == ["000004", "000005", "000008", "best", "last"]
    assert (run / "checkpoints/best").readlink() == Path("000004")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "notes.txt").write_text("mine"),
        lambda folder: (folder / "craft_manifest.json").write_text("{}"),
        lambda folder: (folder / "craft_manifest.json").unlink(),
    ],
)
def test_a_checkpoint_with_anything_else_in_it_stays(
    run: Path, damage: Callable[[Path], object]
) -> None:
    damage(run / "checkpoints/000002")
    assert [folder.name for folder in remove_older(run, keep=1)] == ["000004", "000006"]


def test_a_best_checkpoint_that_is_gone_has_no_link(run: Path) -> None:
    point_to_best(run, 6)
    point_to_best(run, 2)
    assert (run / "checkpoints/best").readlink() == Path("000002")
    assert point_to_best(run, 7) is None
    assert "best" not in there(run)
