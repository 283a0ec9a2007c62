"""Random changes of an image: LeRobot's own transforms, as a function of the image and a seed.

LeRobot's `ImageTransforms` draws from torch's global generator. Anchors are made in a thread while
the policy trains in another, and both would disturb each other's draws. So the choice of transforms
and their strengths are drawn here, from a generator of the image's own, within LeRobot's ranges.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from lerobot.transforms import ImageTransformsConfig
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

_CONFIG = ImageTransformsConfig()
_STRENGTHS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "brightness": functional.adjust_brightness,
    "contrast": functional.adjust_contrast,
    "saturation": functional.adjust_saturation,
    "hue": functional.adjust_hue,
    "sharpness": functional.adjust_sharpness,
}
_AFFINE = "affine"


def transform_image(image: Tensor, *, seed: int) -> Tensor:
    """Change colours, sharpness and position of an image [..., 3, H, W] with values in 0..1."""
    rng = np.random.default_rng(seed)
    names = [*_STRENGTHS, _AFFINE]
    chosen = rng.choice(len(names), size=_CONFIG.max_num_transforms, replace=False)
    for name in (names[number] for number in sorted(chosen)):
        ranges = _CONFIG.tfs[name].kwargs
        if name == _AFFINE:
            image = _move(image, ranges, rng)
        else:
            image = _STRENGTHS[name](image, float(rng.uniform(*ranges[name])))
    return image


def _move(image: Tensor, ranges: dict[str, Any], rng: np.random.Generator) -> Tensor:
    height, width = image.shape[-2:]
    across, down = ranges["translate"]
    shift = [round(rng.uniform(-1, 1) * across * width), round(rng.uniform(-1, 1) * down * height)]
    moved: Tensor = functional.affine(
        image,
        angle=float(rng.uniform(*ranges["degrees"])),
        translate=[float(pixels) for pixels in shift],
        scale=1.0,
        shear=[0.0, 0.0],
        interpolation=InterpolationMode.NEAREST,
    )
    return moved
