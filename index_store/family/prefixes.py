"""Contexts found by their tokens: those that begin as a text does, and those that are the beginning of one.

Every context of format 4 has digests of its beginnings (`context_id.continued_digests`), each over all tokens before
it and over model, dtype and salt. So two of them that are equal say that everything before is equal, and the longest
common one is found by halving. What is found is compared token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from index_store.errors import SparseKVError
from index_store.family.parents import parent_of
from index_store.store.catalog import Store
from index_store.store.description.context_id import DIGEST_DIGITS, PREFIX_BLOCK, continued_digests
from index_store.store.description.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first `tokens` tokens of a context, which are also those of something else."""

    manifest: Manifest
    tokens: int


def longest_beginning(
    store: Store,
    first: str,
    token_ids: Sequence[int] | Tensor,
    suits: Callable[[Manifest], bool] = lambda _: True,
) -> Beginning | None:
    """The stored context that has the most first tokens in common with these; None where none has a whole block.

    first: of the digests (`context_id.first_digest`). suits: asked first. Those that have expired, are children or
    cannot be read are passed over. Raises what `Store.list` raises.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    digests = continued_digests(first, ids)
    fits = [
        (common, manifest)
        for manifest in store.list()
        if manifest.parent is None
        and (common := _common(digests, manifest.prefix_digests))
        and not store.expired(manifest)
        and suits(manifest)
    ]
    most = max((common for common, _ in fits), default=0)
    found = [
        Beginning(manifest, _equal(stored, ids))
        for common, manifest in fits
        if common == most and (stored := _tokens(store, manifest)) is not None
    ]
    return max(found, key=lambda beginning: beginning.tokens, default=None)


def longest_prefix(store: Store, first: str, token_ids: Sequence[int] | Tensor) -> Manifest | None:
    """The longest stored context, children among them, that these tokens begin with and go on from; None without one.

    As `longest_beginning` otherwise; contexts below one block are not found.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    digests = continued_digests(first, ids)
    fits = [
        manifest
        for manifest in store.list()
        if PREFIX_BLOCK <= manifest.token_count < len(ids)
        and _common(digests, manifest.prefix_digests) == manifest.token_count // PREFIX_BLOCK
        and not store.expired(manifest)
    ]
    for manifest in sorted(fits, key=lambda fit: fit.token_count, reverse=True):
        stored = _tokens(store, manifest)
        if stored is not None and _equal(stored, ids) == manifest.token_count:
            return manifest
    return None


def _common(digests: str, others: str) -> int:
    """Whole blocks that both begin with; 0 also where not even model, dtype and salt are the same."""
    low, high = 0, min(len(digests), len(others)) // DIGEST_DIGITS - 1
    while low < high:
        middle = (low + high + 1) // 2
        place = slice(middle * DIGEST_DIGITS, (middle + 1) * DIGEST_DIGITS)
        low, high = (middle, high) if digests[place] == others[place] else (low, middle - 1)
    return low


def _equal(stored: Tensor, ids: Tensor) -> int:
    """How many first tokens are the same."""
    count = min(len(stored), len(ids))
    differing = (stored[:count] != ids[:count]).nonzero()
    return int(differing[0]) if len(differing) else count


def _tokens(store: Store, manifest: Manifest) -> Tensor | None:
    """All tokens of a context, a child's parent's among them; None where they cannot be read now, or are damaged."""
    try:
        base = parent_of(store, manifest)
        contexts = [manifest] if base is None else [base, manifest]
        return torch.cat([store.bounded(partial(_own_tokens, store, context)) for context in contexts])
    except SparseKVError:
        return None


def _own_tokens(store: Store, manifest: Manifest) -> Tensor:
    with store.open(manifest.id, manifest, expired=True) as context:
        return context.tokens()
