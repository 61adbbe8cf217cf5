"""What a person sees while a job runs: bars on a terminal, plain lines in a pipe. Always on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LINES_PER_PHASE = 10

Update = Callable[[int, int], None]
"""Called with (done, total)."""


class Reporter(Protocol):
    """Where a job says what it does."""

    def note(self, text: str) -> None:
        """One sentence."""
        ...

    def phase(self, title: str, unit: str) -> AbstractContextManager[Update]:
        """A phase with countable progress: a context manager that yields the function to call with it."""
        ...


class LineReporter:
    """Plain lines, at most about ten per phase."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    @contextmanager
    def phase(self, title: str, unit: str) -> Iterator[Update]:
        written = 0

        def update(done: int, total: int) -> None:
            nonlocal written
            reached = done * _LINES_PER_PHASE // total
            if reached > written:
                written = reached
                self.note(f"{title}: {done} of {total} {unit}")

        yield update


class BarReporter:
    """A progress bar per phase."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    @contextmanager
    def phase(self, title: str, unit: str) -> Iterator[Update]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(f"{title:<12}", total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)


def reporter_for(stream: TextIO = sys.stderr) -> Reporter:
    """Bars when the stream is a terminal, lines otherwise."""
    if stream.isatty():
        return BarReporter(Console(file=stream))
    return LineReporter(stream)
