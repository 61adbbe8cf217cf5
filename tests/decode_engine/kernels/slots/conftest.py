"""Slots are found through addresses and numbers that kernels leave each other, so all of these are watched."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _watched(watched: None) -> None:
    """In every test here."""
