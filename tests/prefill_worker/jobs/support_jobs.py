"""What the tests of jobs share: a job run to its end, and what a failed one may have left."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

from index_store.cli.console import LineReporter
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import PrefillReport, run_job

MakeConfig = Callable[..., PrefillConfig]


def run(config: PrefillConfig, standard_input: bytes = b"") -> PrefillReport:
    return run_job(config, LineReporter(io.StringIO()), io.BytesIO(standard_input))


def hidden_entries(store: Path) -> list[str]:
    return [name for name in os.listdir(store / "contexts") if name.startswith(".")]
