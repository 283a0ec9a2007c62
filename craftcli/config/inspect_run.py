"""Settings of `craft inspect`."""

from dataclasses import dataclass
from pathlib import Path
from typing import override

from craftcli.config.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class InspectRunConfig(Settings):
    """Which run to inspect."""

    run: Path | None = setting(
        None, "The folder of a run of craft train.", metavar="RUN", positional=True
    )

    @override
    def problems(self) -> list[str]:
        return [] if self.run else ["there is no RUN; give the folder of one"]
