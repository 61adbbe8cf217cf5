"""What the doors of one server share, each of which is a process of its own."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial


@dataclass(frozen=True, slots=True)
class Sharing:
    """doors: of the server. places: requests that may be running or waiting at once, all of which may come by one door.
    key: by which each knows what another one has signed."""

    doors: int = 1
    places: int = 0
    key: bytes = field(default_factory=partial(secrets.token_bytes, 32))

    def part(self, most: int) -> int:
        """What one door may have, of which all may have `most` together; at least one."""
        return max(1, most // self.doors)
