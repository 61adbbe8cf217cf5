"""Folders of models for tests that change them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import write_model_folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "llama")
