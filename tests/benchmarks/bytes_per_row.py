"""Bytes a row takes on disk: craft's cache against the shards of the public prototypes.

    uv run python tests/benchmarks/bytes_per_row.py

The same samples in each: two cameras at 224 px, 200 prompt tokens, and the pooled vectors
[2 layers, 2, 2048] of `vision_text`. The prototypes keep float32 images and hidden states and int64
tokens in pickles of 100 rows. Craft keeps uint8 images, or none: by reference, a row says which
frame of the dataset its images are.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from synthetic import Values, activations, print_machine, size_on_disk, write_cache
from table import Row

ROWS, CAMERAS, PIXELS, TOKENS, SHARD_ROWS = 400, 2, 224, 200, 100
PROTOTYPE = "prototype, .pt shards"


def make_images(rows: int) -> Values:
    """Smooth pictures with some noise, [rows, cameras, 3, height, width] uint8."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.random((rows * CAMERAS, 3, 8, 8), np.float32))
    smooth = torch.nn.functional.interpolate(coarse, PIXELS, mode="bicubic").clamp(0, 1)
    images = smooth.mul(255).round().to(torch.uint8).numpy()
    noise = rng.integers(0, 4, images.shape, np.uint8)
    mixed: Values = images // 2 + noise
    return mixed.reshape(rows, CAMERAS, 3, PIXELS, PIXELS)


def make_tokens(rows: int) -> dict[str, Values]:
    """Prompt tokens and their mask as the preprocessor gives them."""
    rng = np.random.default_rng(1)
    mask = np.arange(TOKENS) < rng.integers(20, TOKENS, (rows, 1))
    return {"inputs/tokens": rng.integers(0, 257_152, mask.shape) * mask, "inputs/mask": mask}


def write_prototype(folder: Path, images: Values, tokens: dict[str, Values]) -> None:
    """Shards as the prototype for pi0_fast writes them."""
    folder.mkdir()
    hidden = activations(len(images), 2, 2048, "float32")
    for number, start in enumerate(range(0, len(images), SHARD_ROWS)):
        where = slice(start, start + SHARD_ROWS)
        shard = {
            "pixel_values": torch.from_numpy(images[where].astype(np.float32) / 255),
            "input_ids": torch.from_numpy(tokens["inputs/tokens"][where].copy()),
            "attention_mask": torch.from_numpy(tokens["inputs/mask"][where].astype(np.int64)),
            "teacher_hidden": torch.from_numpy(hidden[where].copy()),
        }
        torch.save(shard, folder / f"shard_{number:04d}.pt")


def write_craft(folder: Path, images: Values, tokens: dict[str, Values]) -> dict[str, Path]:
    """Caches of both kinds and dtypes."""
    cameras = {f"inputs/image.{camera}": images[:, camera] for camera in range(CAMERAS)}
    narrow = tokens | {"inputs/tokens": tokens["inputs/tokens"].astype(np.int32)}
    kinds: dict[str, tuple[str, dict[str, Values]]] = {
        "craft, embedded, float32": ("float32", tokens | cameras),
        "craft, embedded, float16": ("float16", tokens | cameras),
        "craft, by reference, float32": ("float32", tokens),
        "craft, by reference, float16": ("float16", tokens),
        "the last with int32 tokens": ("float16", narrow),
    }
    paths = {name: folder / f"{number}.zarr" for number, name in enumerate(kinds)}
    for name, (dtype, inputs) in kinds.items():
        # Whole chunks, so that no padding is counted that a larger cache would not have.
        write_cache(paths[name], activations(len(images), 2, 2048, dtype), inputs, chunk=50)
    return paths


def measure(count: int) -> dict[str, float]:
    """Bytes a row on disk in every way, each written once."""
    images, tokens = make_images(count), make_tokens(count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prototype(folder / "shards", images, tokens)
        paths = {PROTOTYPE: folder / "shards"} | write_craft(folder, images, tokens)
        return {way: size_on_disk(path) / count for way, path in paths.items()}


def rows(*, quick: bool) -> list[Row]:
    """The size of a row of craft's caches over that of the prototype."""
    sizes = measure(50 if quick else ROWS)
    first = sizes.pop(PROTOTYPE)
    return [
        Row(compared=f"size: a row of {way} / the prototype's", measure="bytes", ratio=size / first)
        for way, size in sizes.items()
    ]


def main() -> None:
    """Print the sizes."""
    print_machine()
    sizes = measure(ROWS)
    first = sizes[PROTOTYPE]
    print(f"\n{'':30}{'bytes a row':>13}{'smaller':>10}")
    for way, size in sizes.items():
        print(f"{way:30}{size:>13,.0f}{first / size:>9.1f}x")
    print(f"{ROWS} rows; metadata and statistics are counted, and weigh less in larger caches")


if __name__ == "__main__":
    main()
