"""Which decode steps are compared with full attention (`decode_engine/model/auditing.py`)."""

from __future__ import annotations

import random


class Audits:
    """Which steps of a session are audited: each with the same chance. latest: position of the last one."""

    def __init__(self, share: float) -> None:
        """share: of the steps, above 0 and at most 1."""
        self.share = share
        self.latest = -1
        self._drawn = (-1, False)

    def due(self, position: int) -> bool:
        """Whether the step of the token at this position is; the same however often it is asked."""
        if self._drawn[0] != position:
            self._drawn = position, random.random() < self.share
        return self._drawn[1]
