"""What the commands print: text or JSON, tables, progress, sizes and times."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Protocol, TextIO

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_GAP = "  "


def print_json(document: Mapping[str, object]) -> None:
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def on_terminal() -> bool:
    """Whether a person reads standard output."""
    return Console().is_terminal


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Prints a table on a terminal, aligned plain columns in a pipe.

    right: right-aligned columns. optional: columns that a narrow terminal leaves out until the others fit, in this
    order; cells that are still too long end in an ellipsis. Without any, long cells take several lines.
    """
    console = Console(highlight=False, markup=False)
    widths = {
        column: max(cell_len(line[place]) for line in (columns, *rows))
        for place, column in enumerate(columns)
    }
    if console.is_terminal and not optional:
        _print_folded(console, columns, rows, right)
        return
    left_out = _fit(widths, optional, console.width) if console.is_terminal else []
    for number, line in enumerate((columns, *rows)):
        cells = dict(zip(columns, line, strict=True))
        shown = _GAP.join(_cell(cells[name], width, name in right) for name, width in widths.items()).rstrip()
        console.print(shown, style="bold" if number == 0 else None, soft_wrap=True)
    if left_out:
        hint = f"Not shown in {console.width} columns: {', '.join(left_out)} (--format json shows everything)"
        console.print(hint, style="dim")


def _fit(widths: dict[str, int], optional: Sequence[str], room: int) -> list[str]:
    """Takes optional columns out until the others fit, then narrows the widest after the first; tells which it took."""
    left_out = []

    def excess() -> int:
        return sum(widths.values()) + len(_GAP) * (len(widths) - 1) - room

    for column in optional:
        if excess() <= 0:
            break
        left_out.append(column)
        del widths[column]
    if excess() > 0:
        widest = max(list(widths)[1:], key=widths.__getitem__)
        widths[widest] = max(len(widest), widths[widest] - excess())
    return left_out


def _cell(text: str, width: int, right: bool) -> str:
    """A text in that many columns of a terminal, which are not its number of characters; cut where it is longer."""
    if cell_len(text) > width:
        text = f"{set_cell_size(text, width - 1).rstrip()}…"
    blanks = " " * (width - cell_len(text))
    return blanks + text if right else text + blanks


def _print_folded(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


@contextmanager
def byte_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes on a terminal, nothing in a pipe; yields what to call with each number of bytes."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)


def format_time(time: datetime | None) -> str:
    """A time in UTC to the second; 'never' for none."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ") if time is not None else "never"


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
