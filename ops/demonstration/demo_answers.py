"""The questions of the demonstration: asked over gRPC, with two methods, and their answers judged."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_processes import DemoError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from decode_engine.rpc.client import Client

MAX_TOKENS = 48
SUMMARY_TOKENS = 120
CLEARLY_WORSE = 0.1  # of the questions


@dataclass(frozen=True, slots=True)
class Answer:
    """What one method said. `correct` is None where the right answer is not known."""

    text: str
    correct: bool | None
    fraction_sparse: float
    fraction_all: float
    milliseconds_per_token: float


@dataclass(frozen=True, slots=True)
class Row:
    """One question with both answers. `depth`, `expected`: None for a question that does not tell them."""

    depth: float | None
    question: str
    expected: str | None
    sparse: Answer
    full: Answer


def read_questions(path: Path) -> list[dict[str, Any]]:
    """One object per line: question, and if known answer and depth."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            questions.append({"question": str(entry["question"]), **entry})
        except (ValueError, KeyError, TypeError):
            raise DemoError(
                f"{path}, line {number}: expected a JSON object with a question, such as "
                '{"question": "What is the price of the tea?", "answer": "4821"}'
            ) from None
    if not questions:
        raise DemoError(f"{path} holds no questions")
    return questions


def is_correct(text: str, expected: str | None) -> bool | None:
    """Whether the expected words stand in the answer, whatever stands around them."""
    if expected is None:
        return None
    words = re.escape(expected.strip().rstrip(".").casefold())
    return re.search(rf"(?<!\w){words}(?!\w)", text.casefold()) is not None


def ask(
    client: Client, context: str, question: dict[str, Any], method: str | None, keep: float | None
) -> Answer:
    """Asks one question over gRPC; the answer ends with its line, a summary with the model's own end."""
    summarises = question.get("summarises", False)
    with client.generate(
        context,
        question=question["question"],
        max_tokens=SUMMARY_TOKENS if summarises else MAX_TOKENS,
        stop=[] if summarises else ["\n"],
        method=method,
        keep_ratio=keep,
    ) as generation:
        text = generation.read().strip()
        summary = generation.summary
    fractions, timings = summary.selection, summary.timings
    return Answer(
        text,
        is_correct(text, question.get("answer")),
        1.0 if fractions.fraction_sparse is None else fractions.fraction_sparse,
        fractions.fraction_all,
        timings.decode_ns / max(1, timings.decode_steps) / 1e6,
    )


def ask_all(
    address: str, context: str, questions: Sequence[dict[str, Any]], keep: float | None, console: Console
) -> list[Row]:
    """Every question with the context's own method, then every question with full attention."""
    answers: dict[str, list[Answer]] = {}
    with Client(address) as client:
        client.warm_context(context)
        own = client.get_context(
            context
        ).default_method  # named: over short texts "auto" takes full attention
        for label, method, ratio in (("default method", own, keep), ("full attention", "full", None)):
            ask(client, context, questions[0], method, ratio)  # compiles and touches memory; not reported
            answers[label] = []
            for number, question in enumerate(questions, 1):
                answers[label].append(ask(client, context, question, method, ratio))
                if console.is_terminal or number == len(questions):
                    end = "\n" if number == len(questions) else "\r"
                    console.print(
                        f"Asked with {label}: {number} of {len(questions)}", end=end, highlight=False
                    )
    pairs = zip(questions, answers["default method"], answers["full attention"], strict=True)
    return [Row(q.get("depth"), q["question"], q.get("answer"), sparse, full) for q, sparse, full in pairs]


def summarise(rows: Sequence[Row], prefill: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The figures below the table."""
    known = [row for row in rows if row.expected is not None]
    sparse = [row.sparse for row in rows]
    return {
        "questions": len(rows),
        "with_known_answer": len(known),
        "correct_sparse": sum(bool(row.sparse.correct) for row in known),
        "correct_full": sum(bool(row.full.correct) for row in known),
        "same_answer": sum(row.sparse.text == row.full.text for row in rows),
        "fraction_sparse_layers": statistics.fmean(answer.fraction_sparse for answer in sparse),
        "fraction_all_layers": statistics.fmean(answer.fraction_all for answer in sparse),
        "milliseconds_per_token_sparse": statistics.median(
            answer.milliseconds_per_token for answer in sparse
        ),
        "milliseconds_per_token_full": statistics.median(row.full.milliseconds_per_token for row in rows),
        "context_tokens": prefill["tokens"],
        "prefill_seconds": sum(prefill["seconds"].values()),
        "kv_bytes": prefill["kv_bytes"],
        "index_bytes": sum(prefill["index_bytes"].values()),
        "total_seconds": seconds,
    }


def is_clearly_worse(summary: dict[str, Any]) -> bool:
    """Whether the default method answers fewer questions than full attention, beyond one in ten."""
    if summary["with_known_answer"]:
        lost = summary["correct_full"] - summary["correct_sparse"]
        return bool(lost > CLEARLY_WORSE * summary["with_known_answer"])
    return bool(summary["same_answer"] < (1 - 3 * CLEARLY_WORSE) * summary["questions"])


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
