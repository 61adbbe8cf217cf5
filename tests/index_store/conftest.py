"""Stores for tests: an empty one, and a copy of one with a stored context."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from index_store.store.catalog import Store
from tests.support.store import SyntheticContext, synthetic_context


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store", create=True)


@pytest.fixture(scope="session")
def context() -> SyntheticContext:
    """A synthetic context; the one that `stored` holds."""
    return synthetic_context()


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory, context: SyntheticContext) -> Path:
    """A store's folder with `context` in it, not to be touched."""
    path = tmp_path_factory.mktemp("pristine") / "store"
    context.write(Store(path, create=True))
    return path


@pytest.fixture
def stored(tmp_path: Path, pristine: Path) -> Store:
    """A store of its own that holds `context`."""
    shutil.copytree(pristine, tmp_path / "stored")
    return Store(tmp_path / "stored")


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, list[SyntheticContext]]:
    """A store with four contexts that take equal bytes; only to be read."""
    store = Store(tmp_path_factory.mktemp("many"), create=True)
    contexts = [synthetic_context(seed=seed) for seed in range(4)]
    for context in contexts:
        context.write(store)
    return store, contexts
