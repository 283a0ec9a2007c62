"""Variations of old frames with the labels of the frames they came from: a dataset for replay.

`--mode replay` needs labels, and no dataset holds the rows that `craft cache build --augment` made.
So these rows are written as one: each becomes a short episode that begins with the varied state and
continues with the actions that followed the frame it was made of.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from arms import Entry
from experts import create_dataset
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from views import ACTION, VECTORS

from craftcli.cache.build.build import open_source
from craftcli.cache.build.prompts import Prompts
from craftcli.config.cache import CacheConfig
from craftcli.sources import open_anchor_data, open_policy

VARIED = "varied"
"""What an arm of arms.toml calls this dataset."""
ROWS_FILE = "varied_rows.txt"
"""The frames of the dataset that are the variations, for `craft cache build --indices`."""


def replays_varied(entry: Entry) -> bool:
    """Whether an arm replays variations."""
    return bool(entry.get("cache", {}).get("dataset") == VARIED)


def with_varied(entry: Entry, folder: Path, old: Path, teacher: Path) -> Entry:
    """The arm with the dataset of its variations, which is written into the folder if needed."""
    if not replays_varied(entry):
        return entry
    frames, augment = entry["cache"]["samples"], entry["cache"]["augment"]
    root = folder / f"{VARIED}-{frames}x{augment}"
    write_varied(root, old, teacher, frames=frames, augment=augment)
    return {**entry, "cache": {"dataset": str(root), "indices": str(root / ROWS_FILE)}}


def write_varied(root: Path, old: Path, teacher: Path, *, frames: int, augment: int) -> Path:
    """Write the rows of a cache with these settings, whole or not at all; a dataset is kept."""
    if root.is_dir():
        return root
    partial = root.with_name(f".{root.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    settings = CacheConfig(
        policy=str(teacher), dataset=str(old), device="cpu", samples=frames, augment=augment
    )
    policy = open_policy(settings)
    data = open_anchor_data(settings, policy)
    source = open_source(settings, policy, data, Prompts(seed=settings.seed))
    rows = source.read(range(len(source))).batch
    written = create_dataset(root.name, partial)
    chosen, begin = [], 0
    for row in range(len(source)):
        before, length = _write_episode(written, rows, row)
        chosen.append(begin + before)
        begin += length
    written.finalize()
    (partial / ROWS_FILE).write_text("\n".join(map(str, chosen)), encoding="utf-8")
    partial.rename(root)
    return root


def _write_episode(dataset: LeRobotDataset, rows: dict[str, Any], row: int) -> tuple[int, int]:
    """Write a row as an episode; how many frames come before the varied one, and how many in all.

    The actions of a row begin with that of the first observation that the policy reads.
    """
    # [observations, numbers], even for a policy that reads one.
    states = {name: rows[name][row].reshape(-1, size) for name, size in VECTORS.items()}
    last = len(next(iter(states.values()))) - 1
    actions, padded = rows[ACTION][row], rows[f"{ACTION}_is_pad"][row].clone()
    # Earlier observations are varied too, so that they need frames of their own.
    padded[: last + 1] = False
    # After the end of the source's episode LeRobot pads, as it did for the source.
    length = int(torch.logical_not(padded).sum())
    for step in range(length):
        seen = {name: values[min(step, last)].numpy() for name, values in states.items()}
        dataset.add_frame({**seen, ACTION: actions[step].numpy(), "task": rows["task"][row]})
    dataset.save_episode()
    return last, length
