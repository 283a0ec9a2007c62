"""What a policy can still do, and what can be read from its hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from table import COLOURS, NEW, OLD, UNHEARD, WORDINGS, environment, places_file

from craftcli.evaluation.rollouts import FIRST_SEED, rollout
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset

REPORTED_EPISODES = 50_000
IMAGE_TOKENS = 16
"""A picture has 8 x 8 patches, and 2 x 2 of them become a token."""
RIDGE = 1e-2
"""Weight of the squared coefficients of a probe, in variances of its inputs."""
BATCH_SIZE = 64
FADED = (0.0, 0.3, 0.5, 0.7)
"""Shares of grey in the colours of blocks that no policy has seen so."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Successes by colour, and the share of the variance of places that a probe explains."""

    episodes: int
    """Of each colour."""
    heard: dict[str, int]
    """Successes with the wordings of the data."""
    unheard: dict[str, int]
    """Successes with a wording that is in no data and no anchor."""
    probe: dict[str, float]
    """R² of a linear read-out of every block's place, on episodes of its own."""


@dataclass(frozen=True, kw_only=True)
class Later:
    """Successes on a task that was learned afterwards, by the number of steps."""

    episodes: int
    successes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Recoloured:
    """Successes by colour where all blocks are faded towards the grey of the table."""

    episodes: int
    """Of each colour."""
    successes: dict[str, dict[str, int]]
    """By the share of grey; with 0, the colours are those of the data."""


def recoloured(policy: Path, *, episodes: int, tuning: bool) -> Recoloured:
    """Roll a policy out among blocks that are more and more faded."""
    actor = load_checkpoint(str(policy), device="cpu")
    found = {
        f"{faded:g}": successes(actor, (*OLD, NEW), episodes=episodes, tuning=tuning, faded=faded)
        for faded in FADED
    }
    return Recoloured(episodes=episodes, successes=found)


def measure(policy: Path, data: Path, *, episodes: int, tuning: bool) -> Measured:
    """Roll a policy out in all scenes, and probe it on frames of a dataset."""
    actor = load_checkpoint(str(policy), device="cpu")
    colours = (*OLD, NEW)
    return Measured(
        episodes=episodes,
        heard=successes(actor, colours, episodes=episodes, tuning=tuning),
        unheard=successes(actor, colours, (UNHEARD,), episodes=episodes, tuning=tuning),
        probe=probe(actor, data),
    )


def successes(
    actor: Checkpoint,
    colours: Sequence[str],
    wordings: Sequence[str] = WORDINGS,
    *,
    episodes: int,
    tuning: bool,
    faded: float = 0.0,
) -> dict[str, int]:
    """In how many episodes the hand reaches the block of each colour."""
    first = FIRST_SEED if tuning else REPORTED_EPISODES
    found = {}
    for colour in colours:
        world = environment(colour, wordings, faded=faded)
        rolled = rollout(actor, world, episodes=episodes, seed=first, batch_size=episodes)
        found[colour] = sum(episode.success for episode in rolled.episodes)
    return found


def probe(actor: Checkpoint, data: Path) -> dict[str, float]:
    """How well the image tokens behind the last VLM layer tell where the blocks are."""
    return explained(_image_states(actor, data), np.load(places_file(data)))


def explained(states: NDArray[np.float64], places: NDArray[np.float64]) -> dict[str, float]:
    """R² of a linear map from states [frames, numbers] to places [frames, colours, 2].

    It is fitted on the first two thirds of the frames and judged on the others: R² = 1 - squared
    error / variance, over both coordinates.
    """
    cut = len(states) * 2 // 3
    inputs = (states - states[:cut].mean(0)) / (states[:cut].std(0) + 1e-6)
    # In its dual form, as there are about as many frames as numbers in a state.
    kernel = inputs[:cut] @ inputs[:cut].T + RIDGE * inputs.shape[1] * np.eye(cut)
    found = {}
    for number, colour in enumerate(COLOURS):
        target = places[:, number]
        middle = target[:cut].mean(0)
        weights = inputs[:cut].T @ np.linalg.solve(kernel, target[:cut] - middle)
        error = target[cut:] - middle - inputs[cut:] @ weights
        spread = target[cut:] - target[cut:].mean(0)
        found[colour] = float(1 - (error**2).sum() / max((spread**2).sum(), 1e-12))
    return found


def _image_states(actor: Checkpoint, data: Path) -> NDArray[np.float64]:
    """The states of the image tokens behind the last VLM layer, [frames, tokens x width]."""
    dataset = open_dataset(str(data), root=None, policy_config=actor.policy.config)
    norm = actor.policy.model.vlm_with_expert.get_vlm_model().text_model.norm
    seen: list[torch.Tensor] = []

    def keep(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(inputs[0][:, :IMAGE_TOKENS].flatten(1).detach())

    actor.policy.eval()
    handle = norm.register_forward_pre_hook(keep)
    try:
        for start in range(0, len(dataset), BATCH_SIZE):
            rows = list(range(start, min(start + BATCH_SIZE, len(dataset))))
            with torch.no_grad():
                actor.policy(actor.preprocess(read_rows(dataset, rows)))
    finally:
        handle.remove()
    return torch.cat(seen).double().numpy()
