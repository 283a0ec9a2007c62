"""Which frames of a dataset become anchors."""

import numpy as np

from craftcli.errors import EXIT_USAGE, CraftError


def select_rows(frames: int, samples: int, seed: int) -> list[int]:
    """`samples` different frames, drawn uniformly and sorted, the same for the same seed."""
    if samples > frames:
        raise CraftError(
            f"Cannot select {samples} anchors.",
            why=f"the dataset has {frames} frames.",
            fix=f"ask for --samples {frames} or fewer.",
            exit_code=EXIT_USAGE,
        )
    rng = np.random.default_rng(seed)
    return sorted(int(row) for row in rng.choice(frames, size=samples, replace=False))
