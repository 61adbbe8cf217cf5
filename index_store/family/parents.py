"""Whom a child continues, how much it adds, and its id. Imports nothing slow: who only looks at manifests asks here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from index_store.errors import ContextNotFoundError, ParentMissingError
from index_store.store.catalog import Store
from index_store.store.description.callers import OPERATOR
from index_store.store.description.context_id import context_id
from index_store.store.description.manifest import Manifest

if TYPE_CHECKING:
    from torch import Tensor

MissReason = Literal["not_stored", "partial", "expired", "too_large", "unreadable", "not_looked_for"]


@dataclass(frozen=True, slots=True)
class Missed:
    """Why no longer stored context was taken for a prompt, by the one that comes nearest.

    not_stored: none has more of the prompt's first tokens. partial: one has, but goes on in another way, or is longer
    than the prompt. expired, too_large (for the memory), unreadable (or damaged): one would have been taken otherwise.
    not_looked_for: all of the prompt has to be read. context: its id, "" of none. tokens: of the prompt that it begins
    with; where it goes on in another way, whole blocks of them alone.
    """

    reason: MissReason
    context: str = ""
    tokens: int = 0


ATTENTION = "attention"
"""Note of a manifest: how the tokens attended to what was before them when their keys and values were computed."""

EXACT = "exact"


def parent_of(store: Store, child: Manifest) -> Manifest | None:
    """The manifest of the context that a child continues, expired or not; None of a context that is no child. Who sees
    a child sees what it continues.

    Raises ParentMissingError when it is gone or not the one that the child was made from, and what `Store.manifest`
    raises.
    """
    if child.parent is None:
        return None
    try:
        found = store.seen_by(OPERATOR).manifest(child.parent.id)
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


def child_id(
    parent: Manifest, attention: str, token_ids: Tensor | Sequence[int], *, messages: bool = False
) -> str:
    """Id of a child. token_ids: all of them, the parent's first. messages: whether it is known which they are."""
    reading: dict[str, object] = {"parent": parent.id, ATTENTION: attention}
    if messages:
        reading["messages"] = True
    return context_id(parent.model, parent.dtype, reading, "", token_ids)
