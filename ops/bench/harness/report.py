"""How a benchmark reports: a JSON line per figure as it comes, a table of all of them at the end, and an exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import typer

from decode_engine.evaluation.machine import describe_machine
from harness.checks import CheckFailedError
from index_store.errors import SparseKVError

DIGITS = 5


class Report:
    """The figures of one run. failed: one of them is an error; missed: how others fell short of their bars."""

    def __init__(self, bench: str) -> None:
        self.failed = False
        self.missed: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self._bench = bench
        self._machine = describe_machine() | {"triton": version("triton")}

    def add(self, row: Mapping[str, Any], *missed: str) -> None:
        """Prints a figure's line. missed: what it should have reached, as sentences."""
        line = rounded(dict(row)) | ({"missed": list(missed)} if missed else {})
        self.rows.append(line)
        self.missed += missed
        self.failed = self.failed or "error" in line
        typer.echo(json.dumps({"bench": self._bench, **line, "machine": self._machine}))


@contextmanager
def reporting(bench: str, bars: bool = False, *, gpu: bool = True) -> Iterator[Report]:
    """A report; raises typer.Exit with code 1 when a check fails, or with `bars` when a figure has missed its own.

    gpu: ends the benchmark where there is no CUDA device.
    """
    if gpu:
        require_device()
    report = Report(bench)
    try:
        yield report
    except (CheckFailedError, SparseKVError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo("\n".join([table(report.rows), *(f"missed: {line}" for line in report.missed)]), err=True)
    if report.failed or (bars and report.missed):
        raise typer.Exit(1)


def require_device() -> None:
    """Ends a benchmark that needs a GPU where there is none."""
    if not torch.cuda.is_available():
        typer.echo("error: this benchmark needs a CUDA device", err=True)
        raise typer.Exit(1)


def rounded(value: Any) -> Any:
    """The same with all floats in it rounded."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return round(value, DIGITS) if isinstance(value, float) else value


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a column for every plain value that is not the same in all rows."""
    names = dict.fromkeys(name for row in rows for name in row)
    cells = {name: [_cell(row.get(name)) for row in rows] for name in names}
    columns = [[name, *found] for name, found in cells.items() if len(rows) == 1 or len(set(found)) > 1]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in zip(*columns, strict=True)
    ]
    rule = "-|-".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [*lines[:1], rule, *lines[1:]])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value) if isinstance(value, str | int) else "-"
