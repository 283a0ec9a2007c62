"""Errors with one explanation everywhere: a full disk, no permission, a lost worker process."""

import errno

from craftcli.errors import CraftError, explain_lost_worker

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_MISSING = (errno.ENOENT, errno.ENOTDIR)
_FULL_TEXT = "No space left on device"
"""As libraries write it whose errors have no number, such as safetensors."""
_ELSEWHERE = (
    "choose another folder: with --output for results, HF_HOME for downloads and LeRobot's data, "
    "CRAFT_HOME for the demo's data."
)


def explain(error: BaseException) -> CraftError | None:
    """The error as a user understands it; None if it is of another kind."""
    if is_full_disk(error):
        return CraftError(
            f"The disk is full{_place(error)}.",
            why=f"{error}.",
            fix="free some space and run the command again; what was saved before is kept. "
            "--output, HF_HOME and CRAFT_HOME can name another disk.",
        )
    if isinstance(error, OSError) and error.errno in _FORBIDDEN:
        return CraftError(
            f"You may not write or read{_place(error) or ' a file'}.",
            why=f"{error.strerror}.",
            fix=_ELSEWHERE,
        )
    if isinstance(error, OSError) and error.errno in _MISSING and error.filename:
        return CraftError(
            f"There is no {error.filename}, and it cannot be made.",
            why=f"{error.strerror}.",
            fix=_ELSEWHERE,
        )
    return explain_lost_worker(error)


def is_full_disk(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, is that of a full disk."""
    seen: set[int] = set()
    # Some libraries raise an error from one that it caused itself.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        number = error.errno if isinstance(error, OSError) else None
        if number in _FULL or (number is None and _FULL_TEXT in str(error)):
            return True
        error = error.__cause__
    return False


def _place(error: BaseException) -> str:
    name = error.filename if isinstance(error, OSError) else None
    return f" at {name}" if name else ""
