"""Mixtures of frames: inputs that no dataset holds, made from two frames that one does.

The teacher answers for any input, so made inputs need no labels. Images are made again from their
recipe, to the bit, wherever they are needed.
"""

from collections.abc import Collection

import numpy as np
import torch

from craftcli.cache.variations import Variations
from craftcli.errors import CraftError
from craftcli.policies.base import Batch
from craftcli.policies.lerobot.image_variation import transform_image
from craftcli.policies.lerobot.input_statistics import InputStatistics


def mix_vectors(
    batch: Batch,
    partners: Batch,
    variations: Variations,
    statistics: InputStatistics,
    *,
    noise: float,
) -> None:
    """Replace the vectors of mixtures: x = w a + (1 - w) b + noise * s * z.

    Numbers that do not move keep the value of the first frame.
    """
    names = [name for name in statistics.vectors if name in batch]
    mixed = {name: batch[name].clone() for name in names}
    for row in variations.mixed:
        weight = float(variations.weights[row])
        shift = statistics.draw_noise(np.random.default_rng(int(variations.seeds[row])))
        for name in names:
            between = weight * batch[name][row] + (1 - weight) * partners[name][row]
            # The same shift for every observation of a history: a velocity stays what it was.
            moved = between + noise * torch.from_numpy(shift[name]).to(between.dtype)
            moves = torch.from_numpy(statistics.vectors[name].moves)
            mixed[name][row] = torch.where(moves, moved, batch[name][row])
    batch.update(mixed)


def mix_images(
    batch: Batch, partners: Batch, variations: Variations, cameras: Collection[str]
) -> None:
    """Replace the images of mixtures: both frames by their weights, then a random transform."""
    for name in cameras:
        if name not in batch and name not in partners:
            continue
        _require_same_camera(name, batch, partners)
        mixed = batch[name].clone()
        for row in variations.mixed:
            weight = float(variations.weights[row])
            between = weight * batch[name][row] + (1 - weight) * partners[name][row]
            changed = transform_image(between, seed=int(variations.seeds[row]))
            # Whole bytes, so that an embedded image takes a quarter of the space.
            mixed[row] = (changed.clamp(0, 1) * 255).round() / 255
        batch[name] = mixed


def _require_same_camera(name: str, batch: Batch, partners: Batch) -> None:
    """Refuse to mix frames that one camera shows differently, or not at all."""
    sizes = [
        f"{rows[name].shape[-1]} x {rows[name].shape[-2]} px" if name in rows else "nothing"
        for rows in (batch, partners)
    ]
    if sizes[0] != sizes[1]:
        raise CraftError(
            "Frames with different cameras cannot be mixed.",
            why=f"{name} shows {sizes[0]} in one frame and {sizes[1]} in another.",
            fix="build a cache of each kind of frames (--episodes), and join them with "
            "craft cache merge.",
        )
