"""Whom a child continues, and how much it adds. Imports nothing slow: who only looks at manifests asks here."""

from __future__ import annotations

from index_store.errors import ContextNotFoundError, ParentMissingError
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest


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


GROWN_TOKENS, GROWN_SHARE = 4096, 0.25


def outgrown(child: Manifest, share: float = GROWN_SHARE) -> bool:
    """Whether what a child adds is no longer short: at least so many tokens, and such a share of its parent's.

    Every session reads and indexes them anew and holds them for itself; a copy of the parent's keys and values beside
    the child's takes five times what the child stores at most, and indexes of its own. share: 0 for never.
    """
    if child.parent is None or not share:
        return False
    added = child.token_count - child.parent.token_count
    return added >= max(GROWN_TOKENS, share * child.parent.token_count)
