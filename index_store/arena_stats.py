"""What an arena tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

from index_store.placement import MemoryBytes


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What the arena holds now, and what it did so far.

    used includes contexts that are being loaded; leased is the part that cannot be evicted now. contexts: those that
    are wholly there.
    """

    budget: MemoryBytes
    used: MemoryBytes
    leased: MemoryBytes
    page_locked_bytes: int
    contexts: int
    leases: int
    loads: int
    hits: int
    evictions: int

    @property
    def budget_bytes(self) -> int:
        """Of both memories."""
        return self.budget.total

    @property
    def used_bytes(self) -> int:
        """Of both memories."""
        return self.used.total

    @property
    def leased_bytes(self) -> int:
        """Of both memories."""
        return self.leased.total
