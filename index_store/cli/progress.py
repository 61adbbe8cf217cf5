"""How far a long command has come: bars where the stream is a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Update = Callable[[int, int], None]
"""Called with (done, total)."""

Advance = Callable[[], None]
"""Called once for every piece of work that is done."""

StartStage = Callable[[str, int], Advance]
"""Called with a stage's label and its number of pieces."""

LINE_EVERY_SECONDS = 10.0


class Reporter(Protocol):
    """Where a job says what it does."""

    def note(self, text: str) -> None:
        """One sentence."""
        ...

    def phase(self, title: str, unit: str) -> AbstractContextManager[Update]:
        """A phase with countable progress: a context manager that yields the function to call with it."""
        ...


def reporter_for(stream: TextIO = sys.stderr, *, quiet: bool = False) -> Reporter:
    """Bars when the stream is a terminal, lines otherwise; nothing when `quiet`."""
    if quiet:
        return SilentReporter()
    return _BarReporter(Console(file=stream)) if stream.isatty() else LineReporter(stream)


class SilentReporter:
    """Says nothing."""

    def note(self, text: str) -> None:
        pass

    @contextmanager
    def phase(self, title: str, unit: str) -> Iterator[Update]:
        yield lambda done, total: None


class LineReporter:
    """Plain lines; of a phase one every ten seconds, and one at the end of those that had some."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, text: str) -> None:
        _say(self._stream, text)

    @contextmanager
    def phase(self, title: str, unit: str) -> Iterator[Update]:
        began = spoke = time.monotonic()

        def update(done: int, total: int) -> None:
            nonlocal spoke
            now = time.monotonic()
            if now - spoke >= LINE_EVERY_SECONDS or (done == total and spoke > began):
                spoke = now
                self.note(f"{title}: {done} of {total} {unit}")

        yield update


class _BarReporter:
    """A progress bar per phase."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    @contextmanager
    def phase(self, title: str, unit: str) -> Iterator[Update]:
        with _bars(self._console, TextColumn(unit), TimeElapsedColumn()) as progress:
            task = progress.add_task(f"{title:<12}", total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def show_stages(stream: TextIO, *, quiet: bool = False) -> Iterator[StartStage]:
    """Stages of a long measurement, with an estimate of the time left; nothing when `quiet`."""
    if quiet:
        yield lambda label, total: lambda: None
        return
    if not stream.isatty():
        yield lambda label, total: _StageLines(stream, label, total).advance
        return
    columns = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    with _bars(Console(file=stream), *columns) as progress:

        def start(label: str, total: int) -> Advance:
            task = progress.add_task(label, total=total)
            return lambda: progress.advance(task)

        yield start


class _StageLines:
    """One stage: a line when it begins and ends, and every ten seconds in between."""

    def __init__(self, stream: TextIO, label: str, total: int) -> None:
        self._stream, self._label, self._total = stream, label, total
        self._done = 0
        self._began = self._spoke = time.monotonic()
        self._tell("")

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if self._done == self._total:
            self._tell(f", {now - self._began:.0f} s")
        elif now - self._spoke >= LINE_EVERY_SECONDS:
            self._spoke = now
            left = (now - self._began) / self._done * (self._total - self._done)
            self._tell(f", about {left:.0f} s left")

    def _tell(self, rest: str) -> None:
        _say(self._stream, f"{self._label}: {self._done} of {self._total}{rest}")


def _bars(console: Console, *columns: ProgressColumn) -> Progress:
    first = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    # Pieces may take a minute: an estimate looks back over many of them.
    return Progress(*first, *columns, console=console, speed_estimate_period=3600.0)


def _say(stream: TextIO, text: str) -> None:
    stream.write(f"{text}\n")
    stream.flush()
