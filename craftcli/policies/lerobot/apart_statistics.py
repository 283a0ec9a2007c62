"""Statistics that are kept apart: each dataset of a list is normalised with its own.

A LeRobot checkpoint holds one pair of processors. A run with --stats dataset on several datasets
has one pair for each: `pretrained_model` has the first dataset's, and `dataset_processors/N` beside
it those of dataset N, from 1. In training, one pipeline serves all: its normaliser chooses for
every row by the dataset that the row came from.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, override

import numpy as np
import torch
from lerobot.processor import NormalizerProcessorStep, ProcessorStep, TransitionKey
from numpy.typing import NDArray
from torch import Tensor

from craftcli.policies.lerobot.checkpoint import Checkpoint

DATASET_PROCESSORS = "dataset_processors"
"""Folder beside `pretrained_model` in a checkpoint of a run."""


def for_dataset(policy: Checkpoint, number: int | None) -> Checkpoint:
    """A policy with the processors for one dataset of its list, counted from 0."""
    if number is None or not policy.apart:
        return policy
    pair = policy.apart[number]
    return replace(policy, preprocess=pair.preprocess, postprocess=pair.postprocess, apart=())


def task_preprocessor(policy: Checkpoint, dataset: Any) -> Any:
    """The preprocessor for batches of the new data; one for all datasets of a list."""
    if not policy.apart:
        return policy.preprocess
    together = copy.deepcopy(policy.preprocess)
    pipelines = [pair.preprocess for pair in policy.apart]
    together.steps = [
        ApartNormalizer([pipeline.steps[place] for pipeline in pipelines], dataset.offsets)
        if isinstance(step, NormalizerProcessorStep)
        else step
        for place, step in enumerate(together.steps)
    ]
    return together


class ApartNormalizer(ProcessorStep):  # type: ignore[misc]  # LeRobot has no types
    """Normalises every row of a batch with the statistics of the dataset that it came from."""

    def __init__(
        self, steps: Sequence[NormalizerProcessorStep], offsets: NDArray[np.int64]
    ) -> None:
        """`steps` are the normalisers of the datasets; `offsets` say where their frames begin."""
        self._steps = copy.deepcopy(list(steps))
        self._begins = torch.from_numpy(offsets[1:-1].copy())

    @override
    def __call__(self, transition: Any) -> Any:
        """Normalise with all statistics, and keep of each result the rows of its dataset."""
        index = transition[TransitionKey.COMPLEMENTARY_DATA]["index"].cpu()
        numbers = torch.bucketize(index, self._begins, right=True)
        results = [step(transition) for step in self._steps]
        chosen = results[0].copy()
        chosen[TransitionKey.ACTION] = _rows(
            [result[TransitionKey.ACTION] for result in results], numbers
        )
        observations = [result[TransitionKey.OBSERVATION] for result in results]
        chosen[TransitionKey.OBSERVATION] = {
            key: _rows([observation[key] for observation in observations], numbers)
            for key in observations[0]
        }
        return chosen

    @override
    def transform_features(self, features: Any) -> Any:
        """Features stay what they are."""
        return features


def _rows(values: Sequence[Any], numbers: Tensor) -> Any:
    """Of several versions of a batch, the rows that these numbers choose."""
    if not isinstance(values[0], Tensor) or all(value is values[0] for value in values):
        return values[0]
    chosen = values[0].clone()
    for number, value in enumerate(values[1:], start=1):
        own = (numbers == number).to(value.device)
        chosen[own] = value[own]
    return chosen
