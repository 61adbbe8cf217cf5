"""A folder as an object store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from index_store.errors import ObjectsUnavailableError
from index_store.objects.courier import Courier
from index_store.objects.tier import Tier, open_store
from index_store.store.catalog import Store
from tests.index_store.objects.site_process import book, look
from tests.index_store.objects.site_process import site as site_of
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


def test_a_door_which_has_no_torch_can_fetch(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    (tmp_path / "bucket").mkdir()
    here, courier = site_of(tmp_path / "here", url)
    context = book(1)
    context.write(here)
    look(courier)
    _, there = site_of(tmp_path / "there", url)
    look(there)
    program = (
        "import sys; sys.modules['torch'] = None; from index_store.objects.tier import open_store; "
        f"open_store({str(tmp_path / 'there')!r}, objects={url!r}).bring({context.id!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=120, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not Store(tmp_path / "there").verify(context.id)
