"""What the commands share: output as text or JSON, tables, progress, and errors as one sentence."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from index_store.errors import SparseKVError


def run_app(app: typer.Typer, argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line and exits: 0, 1 after an error (one sentence on standard error), 2 for wrong usage."""
    try:
        app(args=None if argv is None else list(argv))
    except SystemExit as ended:
        _finish_output()
        sys.exit(ended.code)
    except SparseKVError as error:
        fail(error.message)
    except OSError as error:
        _finish_output()
        full = error.errno == errno.ENOSPC and "standard output or a file cannot be written"
        fail(f"{error.filename or full or 'system'}: {error.strerror or error}")
    sys.exit(0)


def _finish_output() -> None:
    """Writes out what standard output still holds; exits with 1 and a sentence when it cannot, as on a full disk."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes once more when it ends, and would report the same error with a stack trace.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)  # the reader has gone, as with `| head`
        fail(f"standard output cannot be written: {error.strerror or error}")


def fail(message: str) -> NoReturn:
    """Prints the sentence on standard error and exits with 1."""
    typer.echo(f"error: {message}", err=True)
    sys.exit(1)


def print_json(document: Mapping[str, object]) -> None:
    """Prints one JSON object."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def on_terminal() -> bool:
    """Whether a person reads standard output."""
    return Console().is_terminal


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Prints a table on a terminal, aligned plain columns in a pipe. `right` names right-aligned columns."""
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, justify="right" if column in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ]
        typer.echo("  ".join(cells).rstrip())


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


def format_bytes(count: float) -> str:
    """A size with a binary unit: 1536 -> '1.5 KiB'."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def format_time(time: datetime | None) -> str:
    """A time in UTC to the second; 'never' for none."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ") if time is not None else "never"
