"""Whom a child continues. Imports nothing that takes seconds: who only looks at manifests asks here."""

from __future__ import annotations

from index_store.errors import ContextNotFoundError, ParentMissingError
from index_store.store.catalog import Store
from index_store.store.manifest import Manifest


def parent_of(store: Store, child: Manifest) -> Manifest | None:
    """The manifest of the context that a child continues, expired or not; None of a context that is no child.

    Raises ParentMissingError when it is gone or not the one that the child was made from, and what `Store.manifest`
    raises.
    """
    if child.parent is None:
        return None
    try:
        found = store.manifest(child.parent.id)
    except ContextNotFoundError:
        raise ParentMissingError.of(child.id, child.parent.id, "is not in the store") from None
    made_from = (child.parent.token_count, child.model.fingerprint, child.dtype, None)
    if (found.token_count, found.model.fingerprint, found.dtype, found.parent) != made_from:
        raise ParentMissingError.of(child.id, found.id, "is not the one that it was made from")
    return found
