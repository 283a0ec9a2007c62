"""The ways to keep rows that craft's cache is compared with, each written and read as users do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
import zarr
from synthetic import LAYERS, Values, write_cache

from craftcli.cache.reading.reader import CacheReader

SHARD_ROWS = 100
Read = Callable[[Values], Any]


def write_memmap(path: Path, hidden: Values) -> None:
    out = np.memmap(path, hidden.dtype, "w+", shape=hidden.shape)
    out[:] = hidden
    out.flush()


def read_memmap(path: Path, hidden: Values) -> Read:
    return np.memmap(path, hidden.dtype, "r", shape=hidden.shape).__getitem__


def write_shards(path: Path, hidden: Values) -> None:
    path.mkdir()
    for number, start in enumerate(range(0, len(hidden), SHARD_ROWS)):
        rows = torch.from_numpy(hidden[start : start + SHARD_ROWS].copy())
        torch.save({"teacher_hidden": rows}, path / f"shard_{number:04d}.pt")


def read_shards(path: Path, hidden: Values) -> Read:
    """As the prototypes do: the last shard is kept, any other is loaded."""
    kept: dict[int, torch.Tensor] = {}

    def row(number: int) -> torch.Tensor:
        shard = number // SHARD_ROWS
        if shard not in kept:
            kept.clear()
            loaded = torch.load(path / f"shard_{shard:04d}.pt", weights_only=True)
            kept[shard] = loaded["teacher_hidden"]
        return kept[shard][number % SHARD_ROWS]

    return lambda rows: torch.stack([row(number) for number in rows.tolist()])


def write_safetensors(path: Path, hidden: Values) -> None:
    safetensors.numpy.save_file({"hidden": hidden}, path)


def read_safetensors(path: Path, hidden: Values) -> Read:
    file: Any = safetensors.safe_open(path, framework="np")
    rows_of = file.get_slice("hidden")
    return lambda rows: np.concatenate([rows_of[number : number + 1] for number in rows.tolist()])


def write_zarr(path: Path, hidden: Values) -> None:
    """Zarr's own defaults, compression included."""
    group = zarr.create_group(path)
    for i, layer in enumerate(LAYERS):
        group.create_array(str(layer), data=np.ascontiguousarray(hidden[:, i]))


def write_craft(path: Path, hidden: Values) -> None:
    write_cache(path, hidden)


def read_craft(path: Path, memory: str) -> Read:
    reader = CacheReader.open(path, memory=memory)
    names = [f"hidden/vlm.{layer}" for layer in LAYERS]
    return lambda rows: [reader.read(name, rows) for name in names]


def read_craft_by_zarr(path: Path, hidden: Values) -> Read:
    """The same cache past craft, through the zarr API."""
    group = zarr.open_group(path, mode="r")
    arrays: list[Any] = [group[f"hidden/vlm.{layer}"] for layer in LAYERS]
    return lambda rows: [array.oindex[rows] for array in arrays]
