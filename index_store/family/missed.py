"""Why no longer stored beginning was found for tokens. Imports nothing slow: who talks to clients says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
