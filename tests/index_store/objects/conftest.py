"""A bucket in memory, and two sites in front of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from index_store.objects.bucket import Bucket
from tests.index_store.objects.sites import Site, memory_bucket
from tests.support.store import SyntheticContext


@pytest.fixture
def bucket() -> Bucket:
    return memory_bucket()


@pytest.fixture
def here(tmp_path: Path, bucket: Bucket, context: SyntheticContext) -> Site:
    """A site that has the context, and has uploaded it."""
    site = Site.at(tmp_path / "here", bucket)
    site.add(context)
    return site


@pytest.fixture
def unaware(tmp_path: Path, here: Site) -> Site:
    """Another one, which has nothing, and has not looked yet."""
    return Site.at(tmp_path / "there", here.tier.bucket)


@pytest.fixture
def there(unaware: Site) -> Site:
    """Another one, which has looked what there is, and fetched nothing."""
    unaware.settle()
    return unaware
