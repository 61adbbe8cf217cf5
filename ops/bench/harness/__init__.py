"""What all benchmarks share: models and contexts, checks, times and baselines, and how figures are reported.

Importing it makes the project's packages importable and sets up OpenMP, which has to happen before torch is imported.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import index_store  # noqa: F401
