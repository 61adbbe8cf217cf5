"""What commands look at before they run, of where contexts are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from index_store.cli.options import OutputFolder
from index_store.cli.quotas import QuotaFile
from index_store.store.catalog import Store


def storing_checks(
    store: Path, objects: str | None, quotas: Path | None, *, create: bool
) -> Iterator[Callable[[], object]]:
    """What is looked at of a store, an object store and quotas; each raises a SparseKVError. create: whether the store
    is made where it is not there. Nothing is made or asked here."""
    from index_store.objects.bucket import check_url

    yield lambda: OutputFolder().check("--store", store) if create and not store.exists() else Store(store)
    yield lambda: None if objects is None else check_url(objects)
    yield lambda: QuotaFile(quotas)
