"""What a checkpoint knows of the data it was trained on: the statistics of its normaliser.

They are enough to draw inputs like those of the old data, and to say how far a varied input is from
them, when the data itself is gone.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType
from lerobot.processor import NormalizerProcessorStep
from lerobot.utils.constants import ACTION
from numpy.typing import NDArray

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import Batch
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.movement import Movement, find_movement, read_vector

WIDE = 2.0
"""Deviations from the mean that stand for the smallest and largest value where neither is known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VectorStatistics:
    """The statistics of one vector, number by number."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    deviation: NDArray[np.float64]
    fixed: tuple[int, ...] = ()
    """Numbers that the user wants left alone: angles, one-hot numbers."""
    movement: Movement | None = None
    """How the numbers move together, if frames showed it."""

    @property
    def moves(self) -> NDArray[np.bool_]:
        """Which numbers varied in the data and are not fixed; the others are never moved."""
        moves: NDArray[np.bool_] = (self.high > self.low) & (self.deviation > 0)
        moves[np.isin(self._leads, self._leads[list(self.fixed)])] = False
        return moves

    def draw_states(self, rng: np.random.Generator, length: int) -> NDArray[np.float64]:
        """[length, numbers]: consecutive states, the last one uniform between low and high.

        A number x was x - k v at k steps before, with v = speed * deviation * z and z from a
        standard normal distribution. What repeats a number is it a step earlier. Without frames
        that show how numbers move, v = 0 and all are drawn apart.
        """
        span = np.maximum(self.high - self.low, 0)
        last = self.low + rng.uniform(size=len(span))[self._leads] * span
        if self.movement is None:
            return np.broadcast_to(last, (length, len(last)))
        change = rng.standard_normal(len(span))[self._leads] * self.movement.speed * self.deviation
        steps = np.arange(length)[::-1, None] + self.movement.repeats
        states: NDArray[np.float64] = np.clip(last - steps * change, self.low, self.low + span)
        return states

    def draw_noise(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """A random change, in which every number has its own deviation, and its repetition too."""
        noise = rng.standard_normal(len(self.low))[self._leads]
        return np.where(self.moves, self.deviation * noise, 0.0)

    def moving_as(
        self, values: NDArray[np.float64], follows: NDArray[np.bool_]
    ) -> "VectorStatistics":
        """The same, with the movement that frames show; `values` are [frames, numbers]."""
        movement = find_movement(
            values, follows, low=self.low, high=self.high, deviation=self.deviation
        )
        return replace(self, movement=movement)

    @property
    def _leads(self) -> NDArray[np.intp]:
        return np.arange(len(self.low)) if self.movement is None else self.movement.leads

    def key(self) -> bytes:
        """Equal for vectors with equal statistics."""
        return b"".join(a.tobytes() for a in (self.low, self.high, self.deviation))


@dataclass(frozen=True, kw_only=True, eq=False)
class InputStatistics:
    """The inputs of a policy by the names of its dataset, and the statistics of its vectors."""

    vectors: Mapping[str, VectorStatistics]
    missing: tuple[str, ...]
    """Vectors that the policy reads and the normaliser has no statistics of."""
    cameras: tuple[str, ...]
    histories: Mapping[str, int]
    """How many observations a vector holds, for policies that read several."""
    action_shape: tuple[int, ...]
    source: str = "its normaliser"
    """What the statistics were read from."""

    def draw_uniform(self, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
        """One input: every number uniform between its smallest and largest value."""

        def draw(name: str) -> NDArray[np.float32]:
            states = self.vectors[name].draw_states(rng, self.histories.get(name, 1))
            return (states if name in self.histories else states[-1]).astype(np.float32)

        return self._draw(draw)

    def draw_noise(self, rng: np.random.Generator) -> dict[str, NDArray[np.float64]]:
        """A random change of one input, in which every number has its own deviation."""
        return self._draw(lambda name: self.vectors[name].draw_noise(rng))

    def moving_as(self, dataset: Any, rows: Sequence[int] | None = None) -> "InputStatistics":
        """The same, with the movement that a dataset's frames show: some of them, or the first.

        Vectors that the dataset does not have, or has in another size, stay as they are.
        """
        vectors = dict(self.vectors)
        for name, own in self.vectors.items():
            found = read_vector(dataset, name, rows)
            if found is not None and found[0].shape[1] == len(own.low) and len(found[0]) > 1:
                vectors[name] = own.moving_as(*found)
        return replace(self, vectors=vectors)

    def blank_actions(self, rows: int) -> Batch:
        """Zeros in the shape of actions; the teacher's own actions replace them."""
        shape = (rows, *self.action_shape)
        padding = torch.zeros(shape[:-1], dtype=torch.bool)
        return {ACTION: torch.zeros(shape), f"{ACTION}_is_pad": padding}

    def require_vectors_only(self, *, option: str) -> None:
        """Refuse a policy whose inputs statistics cannot describe."""
        problem = None
        if self.cameras:
            problem = (
                f"it reads images ({', '.join(self.cameras)}), and statistics say little of those"
            )
        elif self.missing:
            problem = f"{self.source} has no statistics of {', '.join(self.missing)}"
        elif not self.vectors:
            problem = "it reads no vector"
        if problem:
            raise CraftError(
                f"{option} does not work for this policy.",
                why=f"{problem}.",
                fix="take anchors from frames (--dataset), from new images with old instructions "
                "(--dataset NEW --prompts OLD.txt), or from an environment (--env).",
                exit_code=EXIT_USAGE,
            )

    def require_variable(self, *, option: str) -> None:
        """Refuse a policy with an input that cannot be varied, or with nothing to vary."""
        problem = None
        if self.missing:
            problem = (
                f"its normaliser has no statistics of {', '.join(self.missing)}, so that nobody "
                "knows how far these numbers may move"
            )
        elif not self.cameras and not any(s.moves.any() for s in self.vectors.values()):
            problem = (
                f"none of its numbers varied in its data ({', '.join(self.vectors) or 'no vector'})"
            )
        if problem:
            raise CraftError(
                f"{option} does not work for this policy.",
                why=f"{problem}.",
                fix="leave such inputs as they are with --augment-fixed NAME, repeat frames with "
                "--draws, or take more frames with --samples.",
                exit_code=EXIT_USAGE,
            )

    def with_fixed(self, fixed: Mapping[str, tuple[int, ...] | None]) -> "InputStatistics":
        """Leave numbers alone, by vector and position; None stands for the whole vector.

        The copies of a vector are left alone in the same places, so that they stay copies.
        """
        by_original: dict[str, set[int]] = {}
        for name, numbers in fixed.items():
            if name in self.vectors:
                size = len(self.vectors[name].low)
                _require_numbers(name, numbers or (), size)
                held = range(size) if numbers is None else numbers
                by_original.setdefault(self._copies[name], set()).update(held)
            elif name not in self.missing:
                raise _unknown_vector(name, [*self.vectors, *self.missing])
        vectors = {
            name: replace(s, fixed=tuple(sorted(by_original.get(self._copies[name], ()))))
            for name, s in self.vectors.items()
        }
        missing = tuple(name for name in self.missing if name not in fixed)
        return replace(self, vectors=vectors, missing=missing)

    def settings(self) -> dict[str, str]:
        """What is left alone and what repeats another number, for the manifest of a cache."""
        fixed = {name: s.fixed for name, s in self.vectors.items()}
        repeated = {
            name: tuple(np.flatnonzero(s.movement.repeats).tolist())
            for name, s in self.vectors.items()
            if s.movement
        }
        named = {"fixed": _listed(fixed), "repeated": _listed(repeated)}
        return {name: numbers for name, numbers in named.items() if numbers}

    def digest(self) -> str:
        """Digest of all statistics."""
        content = hashlib.sha256()
        for name, statistics in sorted(self.vectors.items()):
            content.update(name.encode() + statistics.key())
            if statistics.movement:
                content.update(statistics.movement.key())
        return content.hexdigest()

    @cached_property
    def _copies(self) -> dict[str, str]:
        """For each vector, the first one with the same statistics: it holds the same numbers.

        Drawn apart, such copies contradict each other, and the old skill was lost (0.80 of
        pick-place and 0.52 of the new task, instead of more than 0.9 of both).
        """
        firsts: dict[bytes, str] = {}
        return {name: firsts.setdefault(s.key(), name) for name, s in self.vectors.items()}

    def _draw[T](self, draw: Callable[[str], T]) -> dict[str, T]:
        drawn: dict[str, T] = {}
        for name, original in self._copies.items():
            drawn[name] = drawn[original] if original in drawn else draw(name)
        return drawn


def input_statistics(policy: Checkpoint, file: Path | None = None) -> InputStatistics:
    """Read the statistics of a policy's own normaliser, or of a dataset's stats.json."""
    config = policy.policy.config
    known = _file_statistics(file, policy.renames) if file else _normaliser_statistics(policy)
    to_dataset = {new: old for old, new in policy.renames.items()}
    vectors, missing = {}, []
    for name, feature in config.input_features.items():
        if feature.type is FeatureType.VISUAL:
            continue
        found = _vector(known.get(name, {}), tuple(feature.shape))
        if found is None:
            missing.append(name)
        else:
            vectors[to_dataset.get(name, name)] = found
    steps = config.observation_delta_indices
    actions = config.action_delta_indices
    size = tuple(config.output_features[ACTION].shape)
    return InputStatistics(
        vectors=vectors,
        missing=tuple(missing),
        cameras=tuple(to_dataset.get(name, name) for name in config.image_features),
        histories={} if steps is None else dict.fromkeys(vectors, len(steps)),
        action_shape=size if actions is None else (len(actions), *size),
        **({"source": str(file)} if file else {}),
    )


def _normaliser_statistics(policy: Checkpoint) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for step in getattr(policy.preprocess, "steps", ()):
        if isinstance(step, NormalizerProcessorStep):
            for name, values in step.state_dict().items():
                feature, _, statistic = name.rpartition(".")
                found.setdefault(feature, {})[statistic] = values
    return found


def _file_statistics(file: Path, renames: Mapping[str, str]) -> dict[str, dict[str, torch.Tensor]]:
    """The statistics in a dataset's file, by the policy's names."""
    try:
        content = json.loads(file.read_text("utf-8"))
        return {
            renames.get(feature, feature): {
                name: torch.as_tensor(values, dtype=torch.float64) for name, values in own.items()
            }
            for feature, own in content.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CraftError(
            f"Cannot read the statistics in {file}.",
            why=f"{type(error).__name__}: {error}",
            fix="name the meta/stats.json of a LeRobot dataset.",
            exit_code=EXIT_USAGE,
        ) from error


def _vector(known: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> VectorStatistics | None:
    """The statistics of a vector, from those that there are; None if they are of no use."""
    values = {k: v.double().reshape(-1).numpy() for k, v in known.items() if v.numel() == shape[0]}
    low, high = values.get("min", values.get("q01")), values.get("max", values.get("q99"))
    deviation = values.get("std")
    if low is None or high is None:
        if deviation is None or "mean" not in values:
            return None
        low, high = values["mean"] - WIDE * deviation, values["mean"] + WIDE * deviation
    if deviation is None:
        # Of a uniform distribution over the range.
        deviation = (high - low) / np.sqrt(12)
    return VectorStatistics(low=low, high=high, deviation=deviation)


def _listed(numbers: Mapping[str, tuple[int, ...]]) -> str:
    """Numbers by vector, as --augment-fixed takes them."""
    return ",".join(f"{name}:{','.join(map(str, own))}" for name, own in numbers.items() if own)


def _require_numbers(name: str, numbers: tuple[int, ...], size: int) -> None:
    beyond = [number for number in numbers if number >= size]
    if beyond:
        raise CraftError(
            f"--augment-fixed {name}:{beyond[0]} does not exist.",
            why=f"{name} has {size} numbers, counted from 0.",
            fix=f"use numbers up to {size - 1}.",
            exit_code=EXIT_USAGE,
        )


def _unknown_vector(name: str, known: list[str]) -> CraftError:
    return CraftError(
        f"--augment-fixed names {name!r}, which the policy does not read as a vector.",
        why=f"its vectors are {', '.join(known) or 'none'}.",
        fix="use one of these names, as the dataset has them.",
        exit_code=EXIT_USAGE,
    )
