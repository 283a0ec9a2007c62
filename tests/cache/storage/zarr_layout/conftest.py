"""The small cache, in place of the one that the demo's teacher made."""

from pathlib import Path

import pytest
from made.manifests import make_manifest
from made.small_cache import make_rows, write


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "anchors.zarr"
    write(path, make_manifest(), make_rows(make_manifest()))
    return path
