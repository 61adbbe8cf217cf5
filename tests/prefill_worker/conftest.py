"""A tiny model and a document, jobs over it that are run to their end, and what a failed one may have left."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from index_store.cli.console import LineReporter
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import PrefillReport, run_job
from tests.support.models import write_model_folder

MakeConfig = Callable[..., PrefillConfig]
DOCUMENT = "It was a dark night, and the harbour lay still. " * 12


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny", dtype=torch.bfloat16)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(DOCUMENT)
    return path


@pytest.fixture
def make_config(tiny_model: Path, tmp_path: Path, document: Path) -> MakeConfig:
    """Configurations of a job over the document into `tmp_path / "store"`; keyword arguments replace fields."""

    def make(**changes: Any) -> PrefillConfig:
        settings: dict[str, Any] = {
            "model": str(tiny_model),
            "store": tmp_path / "store",
            "input": (document,),
            "chunk": 100,
            "dense_layers": "none",
        }
        return PrefillConfig(**{**settings, **changes})

    return make


def run(config: PrefillConfig, standard_input: bytes = b"") -> PrefillReport:
    return run_job(config, LineReporter(io.StringIO()), io.BytesIO(standard_input))


def hidden_entries(store: Path) -> list[str]:
    return [name for name in os.listdir(store / "contexts") if name.startswith(".")]
