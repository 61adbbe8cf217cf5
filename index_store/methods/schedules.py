"""When a decode step searches, and with which query."""

from __future__ import annotations

from dataclasses import dataclass

from index_store.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a decode step searches, and with which query.

    period: a selection serves this many decode steps (CSAttention appendix C.2). lag: 1 attends to the selection that
    the step before has made, while its own is made for the next. correct_below: KV heads in which the query of any head
    of the group has a smaller cosine with the query that was searched with are searched again; None never.
    """

    period: int = 1
    lag: int = 0
    correct_below: float | None = None

    def __post_init__(self) -> None:
        if self.period < 1:
            raise InvalidArgumentError(f"period is {self.period}, expected at least 1")
        if self.lag not in (0, 1):
            raise InvalidArgumentError(f"lag is {self.lag}, expected 0 or 1")
        if self.period > 1 and self.lag:
            raise InvalidArgumentError("period and lag exclude one another; choose one")
        if self.correct_below is not None:
            if not self.by_step:
                raise InvalidArgumentError("a correction needs something to correct: period or lag")
            if not -1.0 <= self.correct_below <= 1.0:
                raise InvalidArgumentError(
                    f"correct_below is {self.correct_below}, expected a cosine from -1 to 1"
                )

    @property
    def by_step(self) -> bool:
        """Whether a step's selection depends on earlier steps, so that tokens must be fed one by one."""
        return self.period > 1 or self.lag > 0
