"""`uv run python -m tests.benchmarks`: see all_benchmarks.py."""

import sys
from pathlib import Path

# Benchmarks import each other by bare names, because each is also a script.
sys.path.insert(0, str(Path(__file__).parent))

from all_benchmarks import main

main()
