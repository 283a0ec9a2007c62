"""Errors that say what happened, why, and how to fix it, with their exit codes."""

EXIT_ERROR = 1
"""Something failed."""
EXIT_USAGE = 2
"""The command or its settings cannot be used."""
EXIT_CHECK_FAILED = 3
"""A check of the user's data or policy failed."""
EXIT_INTERRUPTED = 130
"""The user interrupted the command, and its state is saved where possible."""


class CraftError(Exception):
    """A problem that the user can fix; the command line prints it without a traceback.

    >>> str(CraftError("No cache at a.zarr.", why="the folder does not exist.", fix="build one."))
    'No cache at a.zarr. Why: the folder does not exist. Fix: build one.'
    """

    def __init__(self, what: str, *, why: str, fix: str, exit_code: int = EXIT_ERROR) -> None:
        super().__init__(f"{what} Why: {why} Fix: {fix}")
        self.what = what
        self.why = why
        self.fix = fix
        self.exit_code = exit_code


def explain_lost_worker(error: BaseException) -> CraftError | None:
    """The error of a worker process of torch's DataLoader that has ended; None for others.

    torch raises it from a signal handler, so that it may appear anywhere in the main thread.
    """
    if not isinstance(error, RuntimeError) or "DataLoader worker" not in str(error):
        return None
    return lost_worker_error(str(error).splitlines()[0])


def lost_worker_error(found: str) -> CraftError:
    """The error of a worker process that has ended; `found` is how that was noticed."""
    return CraftError(
        "A worker process that reads the data has ended.",
        why=f"{found.rstrip('. ')}. The system ends processes when memory is short.",
        fix="use fewer --workers; with --workers 0 an error in the data is shown itself.",
    )
