"""LeRobot's own commands, each in a fresh process that does not import LeRobot once more.

A process imports LeRobot, which takes many seconds, and forks for every command. Nothing of the
tests is in it: a command sees what it would see in a shell.
"""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory

IMPORTED = ("lerobot.scripts.lerobot_train", "lerobot.scripts.lerobot_eval")


@dataclass(frozen=True)
class Finished:
    """What a command left: its exit code, and all that it printed."""

    exit_code: int
    output: str


class LeRobotCommands:
    """Runs `lerobot-...` and `python -m ...` offline; `packages` are folders to import from."""

    def __init__(self, *packages: Path) -> None:
        self._logs = TemporaryDirectory()
        paths = [*map(str, packages), os.environ.get("PYTHONPATH", "")]
        self._errors = Path(self._logs.name) / "errors"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                },
            )

    def __call__(self, words: Sequence[str], folder: Path) -> Finished:
        """Run a command in a folder."""
        log = Path(self._logs.name) / "command"
        assert self._process.stdin
        assert self._process.stdout
        request = {"words": list(words), "folder": str(folder), "log": str(log)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(self._errors.read_text("utf-8"))
        return Finished(exit_code=int(answer), output=log.read_text("utf-8"))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._logs.cleanup()


def _start(words: list[str]) -> None:
    """Do what the shell's command does, in this process."""
    if words[0] == "python":
        assert words[1] == "-m"
        sys.argv = words[2:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        return
    (command,) = entry_points(group="console_scripts", name=words[0])
    sys.argv = words
    command.load()()


def _in_a_fork(words: list[str], folder: str, log: str) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.chdir(folder)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    code = 1
    try:
        _start(words)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    # The commands' own output goes elsewhere: this pipe has their exit codes only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in IMPORTED:
        __import__(module)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(f"{_in_a_fork(**request)}\n")
        answers.flush()


if __name__ == "__main__":
    # LeRobot's modules, not the helpers beside this file.
    sys.path.remove(str(Path(__file__).parent))
    _serve()
