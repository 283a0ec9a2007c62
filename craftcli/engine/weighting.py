"""Weights for two gradients by TorchJD's methods, from nothing but their inner products."""

import functools
import math
from typing import Any

import torch

from craftcli.engine.products import Products
from craftcli.errors import CraftError

# Methods without a state of their own, so that a resumed run needs none: our name, TorchJD's class
# and its settings. CAGrad's c has no default there; it runs from 0, the mean, towards 1.
_METHODS: dict[str, tuple[str, dict[str, float]]] = {
    "upgrad": ("UPGradWeighting", {}),
    "dualproj": ("DualProjWeighting", {}),
    "mgda": ("MGDAWeighting", {}),
    "cagrad": ("CAGradWeighting", {"c": 0.5}),
    "aligned_mtl": ("AlignedMTLWeighting", {}),
    "imtl_g": ("IMTLGWeighting", {}),
}


def torchjd_weights(name: str, products: Products) -> tuple[float, float]:
    """The weights of the task and the retention gradient.

    They do not depend on a factor common to both. While one gradient is zero, as retention's is at
    the teacher's weights, there is nothing to weigh and both weights are 1: MGDA would not move
    from there. Gradients that are not finite give weights that are not, for the caller to see.
    """
    weighting = require_weighting(name)
    if not products.reached:
        return 1.0, 1.0
    trace = products.task_sq + products.ret_sq
    if not math.isfinite(trace) or not math.isfinite(products.dot):
        return math.nan, math.nan
    # TorchJD takes a small Gramian for zero, and gradients late in training are small.
    gramian = torch.tensor(
        [[products.task_sq, products.dot], [products.dot, products.ret_sq]], dtype=torch.float64
    )
    task, ret = weighting(gramian / trace).tolist()
    return task, ret


@functools.cache
def require_weighting(name: str) -> Any:
    """TorchJD's object for a method, or an error that says what is missing."""
    if name not in _METHODS:
        raise CraftError(
            f"No merge is called {name!r}.",
            why=f"those of TorchJD are {', '.join(_METHODS)}.",
            fix="give --merge one of them.",
        )
    class_name, settings = _METHODS[name]
    try:
        from torchjd import aggregation

        return getattr(aggregation, class_name)(**settings)
    except ImportError as problem:
        # TorchJD raises it too, for the solver that a method needs.
        raise CraftError(
            f"--merge {name} needs TorchJD.",
            why=f"{problem}.",
            fix="pip install 'craftcli[torchjd]'.",
        ) from problem
