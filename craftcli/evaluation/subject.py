"""What is evaluated: a policy, and the run that made it, with what that run knows of."""

import json
from dataclasses import dataclass
from pathlib import Path

from craftcli.cache.reader import CacheReader
from craftcli.config import DEMO, TrainConfig
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER, TinyPI0FastConfig
from craftcli.demo.datasets import NEW, OLD, DemoDataset, ensure_dataset
from craftcli.engine.session import choose_device
from craftcli.errors import CraftError
from craftcli.evaluation.record import PolicyIdentity
from craftcli.locations import Location
from craftcli.policies.identity import weights_digest
from craftcli.policies.loading import Checkpoint, load_checkpoint
from craftcli.run_files import CHECKPOINTS, CONFIG_FILE, MERGE_FILE, STATE_FILE
from craftcli.settings import read_settings


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A dataset to open."""

    repo_id: str
    root: str | None = None
    revision: str | None = None
    group: str | None = None
    """old or new, where that is known."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to evaluate a policy on."""

    cache: Location | None = None
    datasets: tuple[DataSource, ...] = ()
    environments: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """What the run knows of that is not at hand, and why."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An opened policy, and the run that it came from, if any."""

    checkpoint: Checkpoint
    run: Path | None
    config: TrainConfig | None
    trust_remote_code: bool = False
    """Whether it was, and its teacher may be, opened with the code that comes with it."""

    @property
    def is_demo(self) -> bool:
        """Whether the policy lives in the demo's world."""
        return isinstance(self.checkpoint.policy.config, TinyPI0FastConfig)

    @property
    def home(self) -> Path | None:
        """The folder that evaluations are kept in: the run's, or a merged policy's."""
        folder = self.checkpoint.folder
        return folder if self.run is None and (folder / MERGE_FILE).is_file() else self.run

    @property
    def trained_on(self) -> Location | None:
        """The cache that the run was held to."""
        return self.config.cache if self.config and self.config.uses_anchors else None

    @property
    def identity(self) -> PolicyIdentity:
        """Which policy it is."""
        state = self.checkpoint.folder.parent / STATE_FILE
        step = json.loads(state.read_text("utf-8"))["step"] if state.is_file() else None
        return PolicyIdentity(
            source=self.checkpoint.source,
            policy_type=self.checkpoint.policy_type,
            weights_digest=weights_digest(*self.checkpoint.weight_files),
            step=step,
        )

    def plan(self) -> Plan:
        """Everything that the run, or the demo, knows of."""
        cache, left_out = self._cache()
        environments = (DEMO,) if self.is_demo else ()
        datasets = demo_data() if self.is_demo else self._datasets(cache)
        return Plan(cache=cache, datasets=datasets, environments=environments, left_out=left_out)

    def _cache(self) -> tuple[Location | None, tuple[str, ...]]:
        if self.config is None:
            return None, ()
        try:
            CacheReader.open(self.config.cache)
        except CraftError as error:
            return None, (f"drift: {error.what} Give a cache with --cache.",)
        return self.config.cache, ()

    def _datasets(self, cache: Location | None) -> tuple[DataSource, ...]:
        found = []
        if cache is not None:
            old = CacheReader.open(cache).manifest.dataset
            root = self.config.anchor_root if self.config else None
            found.append(DataSource(repo_id=old.repo_id, root=root or old.root, group="old"))
        if self.config is not None:
            new = self.config
            found.append(
                DataSource(
                    repo_id=new.dataset,
                    root=new.dataset_root,
                    revision=new.dataset_revision,
                    group="new",
                )
            )
        return tuple(found)


def demo_data() -> tuple[DataSource, ...]:
    """The demo's old and new data, written on first use."""

    def source(which: DemoDataset, group: str) -> DataSource:
        return DataSource(repo_id=which.repo_id, root=str(ensure_dataset(which)), group=group)

    return source(OLD, "old"), source(NEW, "new")


def open_subject(source: str, *, device: str, trust_remote_code: bool = False) -> Subject:
    """Open a run, a checkpoint of one, any LeRobot policy, or the demo's teacher.

    A run may load the code of its own that it was trusted with when it was trained.
    """
    if source == DEMO:
        teacher = load_checkpoint(str(TEACHER_FOLDER), device=choose_device(device))
        return Subject(checkpoint=teacher, run=None, config=None)
    run = _run_of(Path(source).expanduser())
    if run is not None and not (run / CHECKPOINTS).is_dir():
        raise CraftError(
            f"The run {run} has no checkpoint.",
            why="it ended, or was stopped, before it had saved one.",
            fix="train it again, with a smaller --save-every if it is likely to be stopped.",
        )
    config = _config_of(run) if run else None
    trusted = trust_remote_code or (config is not None and config.trust_remote_code)
    checkpoint = load_checkpoint(source, device=choose_device(device), trust_remote_code=trusted)
    return Subject(checkpoint=checkpoint, run=run, config=config, trust_remote_code=trusted)


def _run_of(given: Path) -> Path | None:
    """The run that a path lies in: it, RUN/checkpoints/STEP, or the policy in that."""
    # Checkpoints have a copy of the settings; the run's own is the outermost.
    inside = [given, *given.resolve().parents[:3]]
    found = [folder for folder in inside if (folder / CONFIG_FILE).is_file()]
    return found[-1] if found else None


def _config_of(run: Path) -> TrainConfig:
    file = run / CONFIG_FILE
    try:
        saved = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CraftError(
            f"The settings of the run {run} cannot be read.",
            why=f"{file.name}: {error}.",
            fix=f"evaluate its policy by itself: {run / CHECKPOINTS}/last/pretrained_model, copied "
            "elsewhere.",
        ) from error
    return TrainConfig(**read_settings(TrainConfig, saved, source=str(file)))
