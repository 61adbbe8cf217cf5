"""Contexts found by their tokens: those that begin as a text does, and those that are the beginning of one.

Every context of format 4 has digests of its beginnings (`context_id.continued_digests`), each over all tokens before
it and over model, dtype and salt. So two of them that are equal say that everything before is equal, and the longest
common one is found by halving. What is found is compared token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.errors import SparseKVError
from index_store.family.parents import Missed, parent_of
from index_store.store.catalog import Store
from index_store.store.description.context_id import DIGEST_DIGITS, PREFIX_BLOCK, continued_digests
from index_store.store.description.manifest import Manifest

LEAST_TOKENS = 32
"""Of a context that is looked for: fewer are read in the time that loading takes."""


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
        if common == most and (stored := stored_tokens(store, manifest)) is not None
    ]
    return max(found, key=lambda beginning: beginning.tokens, default=None)


def longest_prefix(
    store: Store,
    digests: str,
    token_ids: Sequence[int] | Tensor,
    suits: Callable[[Manifest], bool] = lambda _: True,
) -> tuple[Manifest | None, Missed | None]:
    """The longest stored context, children among them, that these tokens begin with, or are; None without one. And why
    it is no longer one; None where it has all of the tokens.

    digests: of the tokens (`context_id.continued_digests`). suits: whether there is memory for one, asked last. As
    `longest_beginning` otherwise; contexts of less than LEAST_TOKENS are not looked at. What follows a context's last
    whole block is told apart by the checksum of its tokens, so that tokens are read of next to none but the one that is
    found.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    written = ids.numpy().astype("<u4")
    fits, missed = [], [Missed("not_stored")]
    for manifest in store.list():
        known = manifest.prefix_digests
        if manifest.token_count < LEAST_TOKENS or not known.startswith(digests[:DIGEST_DIGITS]):
            continue
        common, whole = _common(digests, known), manifest.token_count // PREFIX_BLOCK
        if manifest.token_count > len(ids) or common < whole or not _ends_alike(manifest, written):
            missed.append(Missed("partial", manifest.id, common * PREFIX_BLOCK))
        elif store.expired(manifest):
            missed.append(Missed("expired", manifest.id, manifest.token_count))
        else:
            fits.append(manifest)
    found: Manifest | None = None
    for manifest in sorted(fits, key=lambda fit: fit.token_count, reverse=True):
        stored = stored_tokens(store, manifest)
        if stored is None or _equal(stored, ids) < manifest.token_count:
            missed.append(Missed("unreadable", manifest.id, manifest.token_count))
        elif not suits(manifest):
            missed.append(Missed("too_large", manifest.id, manifest.token_count))
        else:
            found = manifest
            break
    taken = 0 if found is None else found.token_count
    if taken == len(ids):
        return found, None
    return found, max(
        (each for each in missed if not each.tokens or each.tokens > taken), key=lambda each: each.tokens
    )


def _ends_alike(manifest: Manifest, written: NDArray[np.uint32]) -> bool:
    """Whether tokens, as they are written, have the checksum of a context's own."""
    own = written[manifest.token_count - manifest.own_tokens : manifest.token_count]
    return bool(google_crc32c.value(own.tobytes()) == manifest.tokens.checksum((0,)))


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


def stored_tokens(store: Store, manifest: Manifest) -> Tensor | None:
    """All tokens of a context, a child's parent's among them; None where they cannot be read now, or are damaged."""
    try:
        base = parent_of(store, manifest)
        contexts = [manifest] if base is None else [base, manifest]
        return torch.cat([store.bounded(partial(_own_tokens, store, context)) for context in contexts])
    except SparseKVError:
        return None


def _own_tokens(store: Store, manifest: Manifest) -> Tensor:
    if store.elsewhere(manifest.id):  # its tokens are here
        with store.files(manifest) as files:
            return torch.from_numpy(files.token_ids().astype(np.int64))
    with store.open(manifest.id, manifest, expired=True) as context:
        return context.tokens()
