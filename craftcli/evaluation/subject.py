"""The subject of an evaluation: a policy, and the run that made it with what that run knows."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from craftcli.cache.reading.reader import CacheReader
from craftcli.config.policy_and_data import DEMO
from craftcli.config.run_paths import find_paths
from craftcli.config.settings import read_saved_settings
from craftcli.config.train import TrainConfig
from craftcli.demo.datasets import NEW
from craftcli.demo.defaults import is_of_demo
from craftcli.engine.checkpoint_manifest import require_unchanged_policy
from craftcli.engine.retention.anchor_dataset import anchor_folders
from craftcli.engine.run_folder import CHECKPOINTS, CONFIG_FILE, MERGE_FILE, STATE_FILE
from craftcli.engine.saved_steps import last_own_step, written_by_lerobot
from craftcli.engine.verdict import Verdict
from craftcli.errors import CraftError
from craftcli.evaluation.results import PolicyIdentity
from craftcli.locations import Location
from craftcli.policies.identity import DatasetIdentity
from craftcli.policies.lerobot.apart_statistics import for_dataset
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.identity import weights_digest
from craftcli.policies.lerobot.task_processors import for_old_tasks, with_saved_teacher
from craftcli.sources import DataSource, config_sources, dataset_sources, load_policy


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to evaluate a policy on."""

    cache: CacheReader | None = None
    """The opened cache on which drift is measured."""
    datasets: tuple[DataSource, ...] = ()
    environments: tuple[str, ...] = ()
    old_environments: tuple[str, ...] = ()
    """Environments of old tasks, for which a run may have other processors."""
    left_out: tuple[str, ...] = ()
    """What the run used that cannot be opened now, and why."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A loaded policy, and the run that made it, if any."""

    checkpoint: Checkpoint
    run: Path | None
    config: TrainConfig | None
    trust_remote_code: bool = False
    """Whether the policy was loaded, and its teacher may be, with code from its own files."""
    given_teacher: str | None = None
    """The teacher that the user names."""

    @property
    def is_demo(self) -> bool:
        """Whether the policy acts in the demo's world."""
        return is_of_demo(self.checkpoint.policy.config.type)

    @property
    def teacher(self) -> str | None:
        """The teacher that the user names, or the run if it is on this machine."""
        if self.given_teacher is not None or self.config is None:
            return self.given_teacher
        named = self.config.policy
        return named if named == DEMO or Path(named).expanduser().is_dir() else None

    @property
    def home(self) -> Path | None:
        """The folder that keeps evaluations: the run's, or an interpolated policy's."""
        folder = self.checkpoint.folder
        return folder if self.run is None and (folder / MERGE_FILE).is_file() else self.run

    def policy_for(self, group: str | None, number: int | None = None) -> Checkpoint:
        """The policy with the processors for a group of tasks: `old`, `new` or unknown.

        Without a group, as LeRobot opens it. `number` is the place of a dataset in the run's list.
        """
        if group == "old":
            return for_old_tasks(self.checkpoint)
        return for_dataset(self.checkpoint, number)

    @property
    def has_two_processors(self) -> bool:
        """Whether old and new tasks need different processors."""
        return for_old_tasks(self.checkpoint) is not self.checkpoint

    @property
    def trained_on(self) -> Location | None:
        """The cache that the run was trained to hold."""
        return self.config.cache if self.config and self.config.uses_anchors else None

    @property
    def continued_after(self) -> int | None:
        """The last step of craft's if lerobot-train continued the run up to this checkpoint."""
        place = self.checkpoint.folder.parent
        if self.run is None or not (place.name.isdecimal() and written_by_lerobot(place)):
            return None
        return last_own_step(self.run)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the run kept to its budget up to this checkpoint.

        None if there is no run, or one of an earlier version, which kept no record.
        """
        found = self._state.get("verdict")
        return Verdict.from_json(found) if found else None

    @property
    def _state(self) -> dict[str, Any]:
        """The state of the run at the checkpoint; empty if there is no run."""
        file = self.checkpoint.folder.parent / STATE_FILE
        state: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        return state

    @property
    def identity(self) -> PolicyIdentity:
        """Which policy it is."""
        step = self._state.get("step")
        if self.continued_after is not None:
            step = int(self.checkpoint.folder.parent.name)
        return PolicyIdentity(
            source=self.checkpoint.source,
            policy_type=self.checkpoint.policy_type,
            weights_digest=weights_digest(*self.checkpoint.weight_files),
            step=step,
        )

    def plan(self) -> Plan:
        """Everything that the run used, or the demo offers."""
        cache, left_out = self._open_cache()
        environments = (DEMO,) if self.is_demo else ()
        datasets = self._datasets(cache)
        if self.is_demo:
            # The demo's own two, and what else the run was trained on.
            own = dataset_sources(DEMO)
            known = [source.root for source in own]
            datasets = (*own, *(s for s in datasets if s.group == "new" and s.place not in known))
        return Plan(cache=cache, datasets=datasets, environments=environments, left_out=left_out)

    def own_cache(self) -> CacheReader | None:
        """The cache that the run was trained to hold; None if there is none any more."""
        try:
            return None if self.trained_on is None else CacheReader.open(self.trained_on)
        except CraftError:
            return None

    def _open_cache(self) -> tuple[CacheReader | None, tuple[str, ...]]:
        """The run's cache, or the reason why there is none."""
        if self.config is None:
            return None, ()
        if self.config.asks_teacher:
            return None, (
                "drift: the run asked its teacher and has no cache. Give one with --cache.",
            )
        try:
            return CacheReader.open(self.config.cache), ()
        except CraftError as error:
            return None, (f"drift: {error.what} Give a cache with --cache.",)

    def _datasets(self, cache: CacheReader | None) -> tuple[DataSource, ...]:
        """The datasets of the anchors (old) and those that the run was trained on (new)."""
        sources = []
        if cache is not None and cache.manifest.has_dataset and not self._shows_new_data(cache):
            moved = self.config.anchor_root if self.config else None
            parts = cache.manifest.parts
            sources += [
                DataSource(repo_id=old.repo_id, root=folder, group="old")
                for old, folder in zip(parts, anchor_folders(parts, moved), strict=True)
            ]
        if self.config is not None:
            several = len(self.config.datasets) > 1
            sources += [
                replace(new, group="new", number=number if several else None)
                for number, new in enumerate(config_sources(self.config, NEW))
            ]
        return tuple(sources)

    def _shows_new_data(self, cache: CacheReader) -> bool:
        """Whether the anchors are frames of the new data under old instructions.

        The labels of such frames are those of the new task.
        """
        if self.config is None or cache.manifest.prompts_digest is None:
            return False
        new = config_sources(self.config, NEW)
        return any(_same_place(old, source) for old in cache.manifest.parts for source in new)


def _same_place(old: DatasetIdentity, new: DataSource) -> bool:
    if new.place is None or old.root is None:
        return old.repo_id == new.repo_id
    return Path(new.place).resolve() == Path(old.root).resolve()


def open_subject(
    source: str, *, device: str, trust_remote_code: bool = False, teacher: str | None = None
) -> Subject:
    """Open a run, a checkpoint of one, any LeRobot policy, or the demo's teacher."""
    if source == DEMO:
        return Subject(
            checkpoint=load_policy(DEMO, device=device, trust_remote_code=trust_remote_code),
            run=None,
            config=None,
            trust_remote_code=trust_remote_code,
            given_teacher=teacher,
        )
    run = _run_of(Path(source).expanduser())
    if run is not None and not (run / CHECKPOINTS).is_dir():
        raise CraftError(
            f"The run {run} has no checkpoint.",
            why="it ended before it saved one.",
            fix="train it again; a smaller --save-every saves earlier.",
        )
    require_unchanged_policy(source)
    config = _config_of(run) if run else None
    loaded = load_policy(source, device=device, trust_remote_code=trust_remote_code)
    checkpoint = with_saved_teacher(loaded, trust_remote_code=trust_remote_code) if run else loaded
    return Subject(
        checkpoint=checkpoint,
        run=run,
        config=config,
        trust_remote_code=trust_remote_code,
        given_teacher=teacher,
    )


def _run_of(path: Path) -> Path | None:
    """The run that contains a path: RUN, RUN/checkpoints/STEP, or the policy inside that."""
    # Checkpoints hold a copy of the settings; the outermost file is the run's own.
    folders = [path, *path.resolve().parents[:3]]
    runs = [folder for folder in folders if (folder / CONFIG_FILE).is_file()]
    return runs[-1] if runs else None


def _config_of(run: Path) -> TrainConfig:
    file = run / CONFIG_FILE
    try:
        saved = find_paths(json.loads(file.read_text("utf-8")), run)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CraftError(
            f"Cannot read the settings of the run {run}.",
            why=f"{file.name}: {error}.",
            fix=f"copy its policy, {run / CHECKPOINTS}/last/pretrained_model, to another folder "
            "and evaluate the copy.",
        ) from error
    return TrainConfig(**read_saved_settings(TrainConfig, saved, source=str(file)))
