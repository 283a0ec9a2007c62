"""Errors that tell the user what happened, why, and what to do about it."""

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_CHECK_FAILED = 3
EXIT_INTERRUPTED = 130


class CraftError(Exception):
    """A problem the user can act on; the CLI prints it without a traceback.

    >>> str(CraftError("No cache at a.zarr.", why="the folder does not exist.", fix="build one."))
    'No cache at a.zarr. Why: the folder does not exist. Fix: build one.'
    """

    def __init__(self, what: str, *, why: str, fix: str, exit_code: int = EXIT_ERROR) -> None:
        super().__init__(f"{what} Why: {why} Fix: {fix}")
        self.what = what
        self.why = why
        self.fix = fix
        self.exit_code = exit_code
