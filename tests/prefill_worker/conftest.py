"""A tiny model and a document that the tests of jobs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prefill_worker.config import PrefillConfig
from tests.support.models import write_model_folder

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
def make_config(tiny_model: Path, tmp_path: Path, document: Path) -> Callable[..., PrefillConfig]:
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
