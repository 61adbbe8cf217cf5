"""Shows how far a long measurement has come: bars with an estimate on a terminal, now and then a line in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Advance = Callable[[], None]
"""Called once for every piece of work that is done."""

StartStage = Callable[[str, int], Advance]
"""Called with a stage's label and its number of pieces."""

LINE_EVERY_SECONDS = 10.0


@contextmanager
def show_progress(stream: IO[str]) -> Iterator[StartStage]:
    """Progress on the stream, bars if it is a terminal and lines otherwise."""
    console = Console(file=stream)
    if not console.is_terminal:
        yield lambda label, total: _Lines(stream, label, total).advance
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # Pieces may take a minute: the estimate looks back over many of them.
    with Progress(*columns, console=console, speed_estimate_period=3600.0) as progress:

        def start(label: str, total: int) -> Advance:
            task = progress.add_task(label, total=total)
            return lambda: progress.advance(task)

        yield start


class _Lines:
    """One stage: a line when it begins and ends, and every ten seconds in between."""

    def __init__(self, stream: IO[str], label: str, total: int) -> None:
        self._stream, self._label, self._total = stream, label, total
        self._done = 0
        self._began = self._spoke = time.monotonic()
        self._say("")

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if self._done == self._total:
            self._say(f", {now - self._began:.0f} s")
        elif now - self._spoke >= LINE_EVERY_SECONDS:
            self._spoke = now
            left = (now - self._began) / self._done * (self._total - self._done)
            self._say(f", about {left:.0f} s left")

    def _say(self, rest: str) -> None:
        self._stream.write(f"{self._label}: {self._done} of {self._total}{rest}\n")
        self._stream.flush()
