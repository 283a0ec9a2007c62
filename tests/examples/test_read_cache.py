"""The example reads a real cache, and needs neither craft nor torch for it."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples/read_cache/read.py"


def test_zarr_and_numpy_are_enough(cache: Path) -> None:
    watched = (
        f"import runpy, sys; sys.argv = ['read.py', {str(cache)!r}]; "
        f"runpy.run_path({str(SCRIPT)!r}); "
        "print([m for m in ('torch', 'craftcli', 'lerobot') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", watched], capture_output=True, text=True, check=True
    )
    assert "32 rows of craft_tiny_pi0_fast, action_tokens" in run.stdout
    assert "layer 3: (32, 11, 64) float32, mean norm" in run.stdout
    assert "rows of 'reach the red block'" in run.stdout
    assert run.stdout.splitlines()[-1] == "[]"
