"""A folder as an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from index_store.errors import ObjectsUnavailableError
from index_store.objects.courier import Courier
from index_store.objects.tier import Tier, open_store
from tests.support.store import SyntheticContext


def test_a_folder_that_vanished_is_not_made_anew(tmp_path: Path, context: SyntheticContext) -> None:
    """It may be a disk that is not mounted: neither what runs nor the next start takes an empty one for it."""
    folder = tmp_path / "objects"
    url = f"file://{folder}"
    store = open_store(tmp_path / "here", create=True, objects=url)
    context.write(store)
    courier = Courier(store, Tier.of(store))
    assert courier.look()
    folder.rename(tmp_path / "away")
    again = open_store(tmp_path / "here", objects=url)
    for each in (courier, Courier(again, Tier.of(again))):
        assert not each.look()
        assert "was in use, and there is no such folder now" in each.state().problem
    assert not folder.exists()
    with pytest.raises(ObjectsUnavailableError, match="mount it"):
        _ = Tier.of(again).bucket
    (tmp_path / "away").rename(folder)
    back = open_store(tmp_path / "here", objects=url)
    assert Courier(back, Tier.of(back)).look()
