"""The order of the tests."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: a mistake shows within seconds, not after the slow tests of the packages before it."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
