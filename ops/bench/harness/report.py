"""How a benchmark reports: a JSON line per figure as it comes, a table of all of them at the end, and an exit code."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import typer
from torch import Tensor

from decode_engine.evaluation.machine import describe_machine
from index_store.errors import SparseKVError

TOLERANCE = 0.1
"""Root mean square of the difference of logits, relative to their standard deviation: rounding to bfloat16 in 32 random
layers makes about 0.05."""


class CheckFailedError(Exception):
    """A result is wrong, so its time means nothing."""


def failure(error: Exception) -> dict[str, str]:
    """What a line says of a case that has failed; where that was no check, the traceback goes to stderr."""
    if isinstance(error, CheckFailedError):
        return {"error": str(error)[:300]}
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}"[:300]}


def check_close(what: str, found: Tensor, expected: Tensor, limit: float) -> float:
    """The relative error, a ratio of norms. Raises CheckFailedError when it is larger than the limit."""
    expected = expected.double()
    error = float((found.double().view(expected.shape) - expected).norm() / expected.norm())
    if not error <= limit:
        raise CheckFailedError(f"{what}: relative error {error:.2e}, expected at most {limit:.0e}")
    return error


def compare(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE, of: str = "") -> float:
    """Difference of logits relative to their spread. Raises CheckFailedError when it is too large."""
    difference = float((found - expected).square().mean().sqrt() / expected.std())
    if not difference < tolerance:
        raise CheckFailedError(f"logits{of} differ by {difference:.3f} of their spread, limit {tolerance}")
    return difference


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
