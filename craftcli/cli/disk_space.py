"""Whether a disk has room for what a command will write, before it starts."""

import math
import shutil
from pathlib import Path

from craftcli.cli.output import Output, size
from craftcli.config.train import TrainConfig
from craftcli.errors import CraftError
from craftcli.locations import Location


def require_space(place: Location, needed: int, *, what: str, fix: str) -> None:
    """Refuse to start what cannot be written; an object store has no known end."""
    if isinstance(place, Path) and free_bytes(place) < needed:
        raise CraftError(
            f"The disk of {place} has no room for {what}.",
            why=f"it takes about {size(needed)}, and {size(free_bytes(place))} are free.",
            fix=fix,
        )


def check_checkpoints(run: Path, one: int, config: TrainConfig, done: int, output: Output) -> None:
    """Refuse a run whose next checkpoint does not fit; warn if not all of them do.

    Args:
        run: the folder of the run.
        one: bytes of a checkpoint.
        config: the settings of the run.
        done: steps that are done already.
        output: where to warn.
    """
    require_space(
        run, one, what="a checkpoint", fix="free some space, or choose another disk with --output."
    )
    left = config.steps - done
    count = math.ceil(left / config.save_every) if config.save_every else 1
    if config.keep_last:
        count = min(count, config.keep_last + 1)
    if free_bytes(run) < one * count:
        output.warn(
            f"{count} checkpoints of about {size(one)} do not fit on the disk of {run}, which has "
            f"{size(free_bytes(run))} left. A larger --save-every saves fewer; 0 saves the last."
        )


def free_bytes(place: Path) -> int:
    """Free bytes on the disk of a place that may not exist yet."""
    existing = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free
