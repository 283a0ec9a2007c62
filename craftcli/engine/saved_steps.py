"""The checkpoints of a run by their steps, and which of them lerobot-train wrote.

`lerobot-train --resume` continues a run of craft's: it adds checkpoints without any file of craft's
and points `last` to them. Nothing held the policy to its teacher meanwhile.
"""

from pathlib import Path

from craftcli.engine.checkpoint_manifest import MANIFEST_FILE
from craftcli.engine.run_folder import CHECKPOINTS, CONFIG_FILE, STATE_FILE
from craftcli.errors import EXIT_USAGE, CraftError


def checkpoint_steps(run: Path) -> dict[int, Path]:
    """The checkpoints of a run by their steps."""
    folder = run / CHECKPOINTS
    found = folder.iterdir() if folder.is_dir() else ()
    return {int(f.name): f for f in sorted(found) if f.name.isdecimal() and f.is_dir()}


def written_by_lerobot(checkpoint: Path) -> bool:
    """Whether `lerobot-train --resume` wrote this checkpoint of a run, and not craft."""
    own = (STATE_FILE, CONFIG_FILE, MANIFEST_FILE)
    whole = (checkpoint / "pretrained_model").is_dir()
    return whole and not any((checkpoint / name).exists() for name in own)


def last_own_step(run: Path) -> int | None:
    """The step of the last checkpoint that craft wrote; None if there is none."""
    steps = checkpoint_steps(run)
    return max((s for s, folder in steps.items() if not written_by_lerobot(folder)), default=None)


def continued_by_lerobot(run: Path, checkpoint: Path) -> CraftError:
    """The error of resuming from a checkpoint that lerobot-train wrote."""
    last = last_own_step(run)
    back = f"--from {last} resumes from the last one of craft's and sets the later ones aside; or "
    return CraftError(
        f"Cannot resume {run}: lerobot-train has continued it.",
        why=f"its checkpoint {checkpoint.resolve().name} was not written by craft: it has no "
        f"{STATE_FILE}, and nothing held the policy to its teacher meanwhile.",
        fix=f"{back if last is not None else ''}start a new run with --policy "
        f"{checkpoint.parent / checkpoint.resolve().name / 'pretrained_model'}.",
        exit_code=EXIT_USAGE,
    )
