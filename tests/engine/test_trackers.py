"""The trackers as they are, offline: what they were given can be read back from them."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from craftcli.choices import Tracker
from craftcli.engine.metrics import LogEntry
from craftcli.engine.trackers import (
    TENSORBOARD_FOLDER,
    TrackedRun,
    flat_numbers,
    require_tracker,
    tracking,
)
from craftcli.errors import EXIT_USAGE, CraftError

SETTINGS = {"mode": "hidden", "steps": 6}

FIGURES = {"old_loss": 0.01, "new_loss": 0.5, "old_success": 1.0, "new_success": 0.25}
"""What --eval-every measures."""

ENTRY = LogEntry(
    step=2,
    steps=6,
    mode="hidden",
    loss=0.5,
    grad_norm=1.5,
    lr=1e-3,
    update_s=0.1,
    data_s=0.01,
    l_ret=0.25,
    lam=1.0,
    conflict_rate=0.5,
    violation_rate=1.0,
    losses={"hidden": 0.25, "hidden.vlm.3": 0.125},
    lams={"joint": 1.0},
)


def track(kind: Tracker, folder: Path, entries: list[LogEntry], resume: str | None = None) -> Any:
    """Give a tracker these entries; the id that it had."""
    done = entries[0].step - 1 if resume else 0
    run = TrackedRun(folder=folder, settings=SETTINGS, resume=resume, done=done)
    with tracking(kind, run) as tracker:
        for entry in entries:
            tracker.log(entry)
    return tracker.id


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / TENSORBOARD_FOLDER)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def wandb_records(folder: Path) -> list[Any]:
    """Everything in W&B's own file of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # generated
    from wandb.sdk.internal.datastore import DataStore

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    store: Any = DataStore()
    records = []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(data)
        records.append(record)
    store._fp.close()  # its own `close` is for writing
    return records


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in r.history.item}
        for r in wandb_records(folder)
        if r.WhichOneof("record_type") == "history"
    ]


def test_numbers_are_flat_and_what_is_not_measured_is_left_out() -> None:
    numbers = flat_numbers(ENTRY)
    assert numbers["losses/hidden.vlm.3"] == 0.125
    assert numbers["lams/joint"] == 1.0
    assert numbers["violation_rate"] == 1.0
    assert numbers["skipped"] == 0
    assert not {"mode", "step", "steps", "epsilon", "losses"} & set(numbers)
    assert all(map(math.isfinite, numbers.values()))


def test_what_is_measured_while_training_has_columns_of_its_own() -> None:
    numbers = flat_numbers(ENTRY.with_figures(FIGURES, best=2))
    assert {f"eval_{name}": value for name, value in FIGURES.items()}.items() <= numbers.items()
    assert numbers["eval_best"] == 2
    # Most lines are of steps after which nothing is measured, and some runs have no environment.
    assert not any(name.startswith("eval_") for name in flat_numbers(ENTRY))
    partly = flat_numbers(ENTRY.with_figures({**FIGURES, "old_success": None}, best=None))
    assert not {"eval_old_success", "eval_best"} & set(partly)


def test_tensorboard_continues_and_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    lost = replace(ENTRY, step=4, loss=9.0)
    name = track(Tracker.TENSORBOARD, tmp_path, [ENTRY, lost])
    again = [replace(ENTRY, step=4, loss=0.25), replace(ENTRY, step=6, loss=0.125)]
    assert track(Tracker.TENSORBOARD, tmp_path, again, resume=name) == name
    read = scalars(tmp_path)
    assert read["loss"] == [(2, 0.5), (4, 0.25), (6, 0.125)]
    assert set(read) == set(flat_numbers(ENTRY))


def test_wandb_works_offline_and_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    wandb.teardown()  # it reads the environment once a process
    monkeypatch.setenv("WANDB_MODE", "offline")
    # Its service may take longer to start than it likes to wait, on a machine with much to do.
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")
    first, second = tmp_path / "first", tmp_path / "second"
    measured = ENTRY.with_figures(FIGURES, best=2)
    name = track(Tracker.WANDB, first, [measured])
    assert track(Tracker.WANDB, second, [replace(measured, step=4)], resume=name) == name
    wandb.teardown()  # its service may still be writing the files
    (started,) = [r.run for r in wandb_records(first) if r.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert SETTINGS.items() <= config.items()
    assert (started.run_id, started.project, started.display_name) == (name, "craft", "first")
    for folder, step in ((first, 2), (second, 4)):
        (logged,) = wandb_history(folder)
        assert {"step": step, **flat_numbers(measured)}.items() <= logged.items()


def test_wandb_without_a_key_is_an_error_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    wandb.teardown()  # it reads the environment once a process
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(CraftError, match="API key") as refused:
        track(Tracker.WANDB, tmp_path, [ENTRY])
    assert "WANDB_MODE=offline" in refused.value.fix


def test_trackio_writes_local_files_and_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    for module in (trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    measured = ENTRY.with_figures(FIGURES, best=2)
    name = track(Tracker.TRACKIO, tmp_path / "run", [measured])
    track(Tracker.TRACKIO, tmp_path / "run", [replace(ENTRY, step=4)], resume=name)
    assert SQLiteStorage.get_runs("craft") == [name]
    logs = SQLiteStorage.get_logs("craft", name)
    assert [log["step"] for log in logs] == [2, 4]
    assert flat_numbers(measured).items() <= logs[0].items()
    config = SQLiteStorage.get_run_config("craft", name)
    assert config is not None
    assert config["mode"] == "hidden"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", [Tracker.WANDB, Tracker.TENSORBOARD, Tracker.TRACKIO])
def test_a_missing_package_is_an_error_with_the_fix(
    kind: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder of that name, as W&B itself leaves behind, is not the package.
    (tmp_path / kind).mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, kind, raising=False)
    with pytest.raises(CraftError) as refused:
        require_tracker(kind)
    assert f"pip install 'craftcli[{kind}]'" in refused.value.fix
    assert refused.value.exit_code == EXIT_USAGE


def test_a_resumed_run_keeps_its_tracker(craft: Callable[..., Any], cache: Path) -> None:
    sizes = ("--steps", "4", "--save-every", "2", "--log-every", "1", "--anchor-batch-size", "8")
    measured = ("--eval-every", "2", "--eval-env", "demo:blue", "--eval-episodes", "1")
    tracker = ("--tracker", "tensorboard", "--seed", "3")
    run = Path("run")
    done = craft("train", "--cache", cache, "--output", run, *sizes, *measured, *tracker)
    assert done.exit_code == 0, done.output
    checkpoints = sorted(p for p in (run / "checkpoints").iterdir() if p.name.isdigit())
    state = json.loads((checkpoints[-1] / "craft_state.json").read_text())
    assert state["tracker"] == TENSORBOARD_FOLDER
    before = scalars(run)
    last = run / "checkpoints/last"
    last.unlink()
    last.symlink_to(checkpoints[0].name)
    assert craft("train", "--resume", run).exit_code == 0
    after = scalars(run)
    assert [step for step, _ in after["loss"]] == [1, 2, 3, 4]
    assert after["losses/hidden"] == before["losses/hidden"]
    for name in ("eval_old_loss", "eval_new_loss", "eval_new_success"):
        assert [step for step, _ in before[name]] == [0, 2, 4]
        assert after[name] == before[name]
    assert after["eval_best"] == before["eval_best"]
    assert "eval_old_success" not in before


def test_an_unknown_tracker_is_a_usage_error(craft: Callable[..., Any], tmp_path: Path) -> None:
    assert craft("train", "--tracker", "mlflow").exit_code == EXIT_USAGE
    (tmp_path / "craft.json").write_text('{"tracker": "mlflow"}')
    assert craft("train", "--config", "craft.json").exit_code == EXIT_USAGE
