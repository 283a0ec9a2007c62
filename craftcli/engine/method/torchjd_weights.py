"""Weights of the two gradients by TorchJD's methods, computed from their inner products."""

import functools
import math
from typing import Any

import torch

from craftcli.engine.method.gradients import Products
from craftcli.errors import CraftError

# Only methods without state, because a resumed run restores none: our name, TorchJD's class and its
# settings. TorchJD has no default for CAGrad's c, which runs from 0 (the mean) towards 1.
_METHODS: dict[str, tuple[str, dict[str, float]]] = {
    "upgrad": ("UPGradWeighting", {}),
    "dualproj": ("DualProjWeighting", {}),
    "mgda": ("MGDAWeighting", {}),
    "cagrad": ("CAGradWeighting", {"c": 0.5}),
    "aligned_mtl": ("AlignedMTLWeighting", {}),
    "imtl_g": ("IMTLGWeighting", {}),
}


def torchjd_weights(name: str, products: Products) -> tuple[float, float]:
    """The weights of the task and the retention gradient; a common factor does not change them.

    If one gradient is zero, as retention's is at the teacher's weights, both weights are 1: MGDA
    would never leave that point. Gradients that are not finite give NaN, so that the caller sees
    them.
    """
    weighting = require_weighting(name)
    if not products.reached:
        return 1.0, 1.0
    trace = products.task_sq + products.ret_sq
    if not math.isfinite(trace) or not math.isfinite(products.dot):
        return math.nan, math.nan
    # TorchJD treats a small Gramian as zero, and gradients late in training are small.
    gramian = torch.tensor(
        [[products.task_sq, products.dot], [products.dot, products.ret_sq]], dtype=torch.float64
    )
    task, ret = weighting(gramian / trace).tolist()
    return task, ret


@functools.cache
def require_weighting(name: str) -> Any:
    """TorchJD's weighting object for a merge.

    Raises:
        CraftError: TorchJD has no such method, or it or the method's solver is not installed.
    """
    if name not in _METHODS:
        raise CraftError(
            f"Unknown merge {name!r}.",
            why=f"TorchJD's merges are {', '.join(_METHODS)}.",
            fix="choose one of them with --merge.",
        )
    class_name, settings = _METHODS[name]
    try:
        from torchjd import aggregation

        return getattr(aggregation, class_name)(**settings)
    except ImportError as problem:
        # TorchJD raises it too, if the solver of a method is missing.
        raise CraftError(
            f"--merge {name} needs TorchJD.",
            why=f"{problem}.",
            fix="pip install 'craftcli[torchjd]'.",
        ) from problem
