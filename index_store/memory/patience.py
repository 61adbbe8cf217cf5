"""Who waits for memory may be passed, but not for ever: one rule for contexts and for sessions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_PASSED = 8
"""How many others get memory before one whose memory is not free."""


@dataclass(slots=True)
class Patience:
    """Of one who waits: how often others were served meanwhile."""

    passed: int = 0

    @property
    def ended(self) -> bool:
        """Whether nobody may pass any more."""
        return self.passed >= MAX_PASSED


def note_passed(waiting: Iterable[Patience]) -> None:
    """Notes that another one was served before these."""
    for patience in waiting:
        patience.passed += 1
