"""What the commands print: text or JSON, tables, progress, sizes and times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_GAP = "  "


def print_json(document: Mapping[str, object]) -> None:
    """Prints one JSON object."""
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
