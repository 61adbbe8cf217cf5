"""Rendezvous hashing: every key has an order of its own over the replicas.

A replica that joins takes only the keys whose first it is; of one that leaves only its own keys move, each to its
second (Thaler and Ravishankar, 1998). Whoever knows the same names computes the same order: nothing is agreed on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def order_of(key: str, names: Iterable[str]) -> list[str]:
    """The names in the order in which they are asked to hold the key."""
    return sorted(names, key=lambda name: (_weight(key, name), name), reverse=True)


def _weight(key: str, name: str) -> bytes:
    told = f"{len(key)}:{key}{name}"  # so that no other pair is hashed as the same text
    return hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=8).digest()
