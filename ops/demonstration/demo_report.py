"""What the demonstration shows in the end: a table of answers, and a few sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from demo_answers import Answer, Row
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_rows(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="The default method, and full attention")
    table.add_column("depth", justify="right")
    for heading in ("question", "expected", "answer", "with full attention"):
        table.add_column(heading, overflow="fold")
    for heading in ("sparse layers", "all layers", "ms/token", "ms/token, full attention"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            "" if row.depth is None else f"{row.depth:.1%}",
            row.question,
            row.expected or "",
            _marked(row.sparse, row.question),
            _marked(row.full, row.question),
            f"{row.sparse.fraction_sparse:.1%}",
            f"{row.sparse.fraction_all:.1%}",
            f"{row.sparse.milliseconds_per_token:.1f}",
            f"{row.full.milliseconds_per_token:.1f}",
        )
    console.print(table)


def _marked(answer: Answer, question: str) -> Text:
    """The answer without the words that only repeat the question, coloured where it is known to be right or wrong."""
    echo = question.removeprefix("What is ").removesuffix("?") + " is "
    start = len(echo) if answer.text.casefold().startswith(echo.casefold()) else 0
    shown = answer.text[start:]
    if answer.correct is None:
        return Text(shown)
    return Text(shown, style="green") if answer.correct else Text(f"✗ {shown}", style="red")


def print_summary(summary: dict[str, Any], console: Console) -> None:
    known = summary["with_known_answer"]
    right = (
        f"{summary['correct_sparse']} of {known} right, full attention {summary['correct_full']} of {known}; "
    )
    for line in (
        f"Answers: {right if known else ''}{summary['same_answer']} of {summary['questions']} word for word the same.",
        f"Keys touched: {summary['fraction_sparse_layers']:.1%} in the layers that search, "
        f"{summary['fraction_all_layers']:.1%} over all layers.",
        f"Time per token, median: {summary['milliseconds_per_token_sparse']:.1f} ms, "
        f"full attention {summary['milliseconds_per_token_full']:.1f} ms (the whole model, not attention alone).",
        f"Prefill: {summary['context_tokens']:,} tokens in {summary['prefill_seconds']:.1f} s; "
        f"{summary['kv_bytes'] / 1e6:,.1f} MB of keys and values, {summary['index_bytes'] / 1e6:,.1f} MB of index.",
        f"All of it took {summary['total_seconds']:.0f} s.",
    ):
        console.print(line, highlight=False)
