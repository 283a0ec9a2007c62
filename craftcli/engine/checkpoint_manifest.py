"""The manifest of a checkpoint: digests of its files, and of all that a resumed run depends on.

It is written last, into the folder of the checkpoint, and `--resume` and `craft inspect` check it.
Checkpoints of earlier versions have none. Nothing here imports torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from craftcli.config.run_paths import find_beside
from craftcli.engine.file_digests import file_digest, new_digest
from craftcli.engine.outside import (
    LORA_BASE,
    WEIGHTS_FILE,
    Dependency,
    changed_base,
    spoken_kind,
    uncovered,
)
from craftcli.engine.run_files import (
    CHECKPOINTS,
    CONFIG_FILE,
    LAST,
    MERGE_FILE,
    METRICS_FILE,
    STATE_FILE,
    SUMMARY_FILE,
)
from craftcli.engine.run_files import MANIFEST_FILE as MANIFEST_FILE
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.sealed_json import json_digest, sealed, unsealed
from craftcli.whole_files import write_text

FORMAT = 2
"""Version of the file. Version 1 has no digests of the files of datasets and of LoRA's policies."""
_READABLE = (1, FORMAT)

_POLICY_FOLDERS = ("pretrained_model/", "teacher_processors/")
"""In a checkpoint: what `craft eval` opens."""
_PART = 2**20  # of a log, which may be larger than memory


@dataclass(frozen=True, kw_only=True)
class LogMark:
    """The part of metrics.jsonl that belongs to a checkpoint: its first bytes."""

    size: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """What a checkpoint consists of and depends on."""

    files: Mapping[str, str]
    """The digest of every file of the checkpoint, by its path there."""
    run_files: Mapping[str, str] = field(default_factory=dict)
    """The same for files of the run's folder that no step changes."""
    log: LogMark | None = None
    summary: bool = False
    """Whether the run had a summary; its file has a digest of its own."""
    depends: Mapping[str, Dependency] = field(default_factory=dict)
    """What lies outside the run: cache, dataset, policy under LoRA weights."""

    def write(self, folder: Path) -> None:
        """Write the file, whole or not at all."""
        text = json.dumps({"format": FORMAT, **sealed(asdict(self))}, indent=1)
        write_text(folder / MANIFEST_FILE, text)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The manifest of a checkpoint; None if it has none.

        Raises:
            ValueError: the file is damaged; the message says so.
        """
        try:
            content = json.loads((folder / MANIFEST_FILE).read_text("utf-8"))
            version, digest = content.pop("format"), content.pop("digest")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{MANIFEST_FILE} cannot be read") from error
        if version not in _READABLE:
            raise ValueError(f"{MANIFEST_FILE} has the format {version!r}, not {FORMAT}")
        if digest != json_digest(content):
            raise ValueError(f"{MANIFEST_FILE} has changed")
        log = content["log"]
        return cls(
            files=content["files"],
            run_files=content["run_files"],
            log=LogMark(**log) if log else None,
            summary=content.get("summary", False),
            depends={name: Dependency(**found) for name, found in content["depends"].items()},
        )

    def problems(self, folder: Path, *, log: bool = True) -> list[str]:
        """What of the checkpoint is missing or has changed; `log`: whether its log counts."""
        run = folder.parent.parent
        return [
            *_differences(folder, self.files),
            *self._run_problems(folder, self.run_files),
            *self._lack_of_summary(run),
            *(self.log_problems(run / METRICS_FILE) if log else ()),
        ]

    def record_problems(self, folder: Path) -> list[str]:
        """Whether the settings of the checkpoint's run have changed or its summary is missing."""
        records = {name: own for name, own in self.run_files.items() if name == CONFIG_FILE}
        run = folder.resolve().parent.parent
        return [*self._run_problems(folder.resolve(), records), *self._lack_of_summary(run)]

    def _run_problems(self, folder: Path, files: Mapping[str, str]) -> list[str]:
        """Which files of the run have changed; its settings may have other steps since."""
        run = folder.parent.parent
        changed = f"{CONFIG_FILE} has changed"
        found = _differences(run, files)
        if changed in found and _with_steps_of(folder, run / CONFIG_FILE) == files[CONFIG_FILE]:
            found.remove(changed)
        return found

    def policy_problems(self, folder: Path) -> list[str]:
        """What of the policy has changed, and of what is read with it."""
        read = {
            name: own
            for name, own in self.files.items()
            if name.startswith(_POLICY_FOLDERS) or name in (CONFIG_FILE, STATE_FILE)
        }
        return [
            *_differences(folder, read),
            *self.record_problems(folder),
            *self._base_problems(folder),
        ]

    def _base_problems(self, folder: Path) -> list[str]:
        """Whether the policy under LoRA weights has changed; opening it says if it is gone."""
        before = self.depends.get(LORA_BASE)
        place = Path(find_beside(before.folder, folder)) if before and before.folder else None
        if before is None or place is None or not (place / WEIGHTS_FILE).is_file():
            return []
        changes = changed_base(before, place)
        if changes is None:
            return []
        return [f"{spoken_kind(LORA_BASE)} in {place} is another" + (changes and f" ({changes})")]

    def _lack_of_summary(self, run: Path) -> list[str]:
        there = not self.summary or (run / SUMMARY_FILE).is_file()
        return [] if there else [f"{SUMMARY_FILE} is missing"]

    def changed_dependencies(self, now: Mapping[str, Dependency]) -> list[str]:
        """Which dependencies differ from those of the checkpoint."""
        found = {
            name: before.changes(now[name]) for name, before in self.depends.items() if name in now
        }
        return [
            f"{spoken_kind(name)} {now[name].name} is not the one of the checkpoint"
            + (f" ({changes})" if changes else "")
            for name, changes in found.items()
            if changes is not None
        ]

    def uncovered(self) -> list[str]:
        """What of the dependencies the manifest has no digests of, in words."""
        found = {name: uncovered(name, own) for name, own in self.depends.items()}
        return [
            f"{spoken_kind(name)} {self.depends[name].name}: {text}"
            for name, text in found.items()
            if text
        ]

    def log_problems(self, file: Path) -> list[str]:
        """Whether the beginning of the log is missing or has changed."""
        if self.log is None:
            return []
        digest, left = new_digest(), self.log.size
        try:
            with file.open("rb") as lines:
                while part := lines.read(min(left, _PART)):
                    digest.update(part)
                    left -= len(part)
        except OSError:
            return [f"{file.name} is missing"] if self.log.size else []
        return [] if digest.hexdigest() == self.log.digest else [f"{file.name} has changed"]


class LogDigest:
    """The digest of a growing log file, as far as it is written."""

    def __init__(self, content: bytes = b"") -> None:
        self._size = len(content)
        self._digest = new_digest(content)

    def add(self, content: bytes) -> None:
        """Count what was appended."""
        self._size += len(content)
        self._digest.update(content)

    @property
    def mark(self) -> LogMark:
        """The file as it is now."""
        return LogMark(size=self._size, digest=self._digest.hexdigest())


def digest_files(folder: Path) -> dict[str, str]:
    """The digest of every file below a folder, by its path there; the manifest itself left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: file_digest(path) for name, path in named.items() if name != MANIFEST_FILE}


def require_unchanged_policy(source: str) -> None:
    """Refuse the policy of a run, a checkpoint or a merge that is not the one that was saved.

    Any other policy, and one that an earlier version saved, has no digests to compare.
    """
    path = Path(source).expanduser()
    places = (path / CHECKPOINTS / LAST, path, path.parent)
    folder = next((place for place in places if (place / MANIFEST_FILE).is_file()), None)
    try:
        if folder is None:
            problems = _differences(path, merged_digests(path) or {})
        else:
            manifest = CheckpointManifest.read(folder)
            problems = manifest.policy_problems(folder.resolve()) if manifest else []
    except ValueError as error:
        problems = [str(error)]
    if problems:
        raise CraftError(
            f"The policy of {source} has changed since it was saved.",
            why="; ".join(problems) + ".",
            fix="restore it from a copy, or use another checkpoint: craft inspect checks them all.",
            exit_code=EXIT_CHECK_FAILED,
        )


def _with_steps_of(checkpoint: Path, file: Path) -> str | None:
    """The digest that a run's settings would have with the steps of a checkpoint.

    `--resume --steps` writes another number there, and nothing else.
    """
    try:
        own, saved = (json.loads(f.read_text("utf-8")) for f in (file, checkpoint / CONFIG_FILE))
        text = json.dumps({**own, "steps": saved["steps"]}, indent=2)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return new_digest(text.encode()).hexdigest()


def merged_digests(folder: Path) -> dict[str, str] | None:
    """The digests of the files of an interpolated policy; None if it is not one, or has none.

    Raises:
        ValueError: the file that holds them is damaged.
    """
    try:
        content = unsealed(json.loads((folder / MERGE_FILE).read_text("utf-8")))
    except OSError:
        return None
    except ValueError as error:
        raise ValueError(f"{MERGE_FILE} cannot be read ({error})") from error
    found: dict[str, str] | None = content.get("files")
    return found


def _differences(folder: Path, expected: Mapping[str, str]) -> list[str]:
    found = []
    for name, digest in expected.items():
        try:
            if file_digest(folder / name) != digest:
                found.append(f"{name} has changed")
        except OSError:
            found.append(f"{name} is missing")
    return found
