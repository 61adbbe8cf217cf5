"""Results of an evaluation: tables for the terminal and for a document, and files, written whole.

A long evaluation writes them again and again, so whoever stops it keeps what is done.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from decode_engine.evaluation.summary import Score

_PROMPTS = {
    "each": "each token of a question searches (prompts each: a CPU serves so unless told otherwise, a GPU exact)",
    "exact": "questions attend to the whole context (prompts exact: a GPU serves so unless told otherwise, a CPU each)",
    "sparse": "the tokens of a question share a search (prompts sparse)",
}
"""What is judged."""


def results_table(scores: Sequence[Score], title: str, prompts: str) -> Table:
    """One line per context length, method and budget; +- are standard errors.

    prompts: what a question's tokens attended to, a value of `Prompts`.
    """
    table = Table(title=title)
    table.add_column("context", justify="right")
    table.add_column("method", no_wrap=True)
    headings = ("budget", "exact match", "loss", "KL", "KL answer", "KL text", "bytes", "keys", "ms/token")
    for heading in (*headings, "keys*", "recall*", "mass*", "error*"):
        table.add_column(heading, justify="right", no_wrap=heading == "budget")
    previous = None
    for score in scores:
        if previous not in {None, score.context_length}:
            table.add_section()
        previous = score.context_length
        table.add_row(
            f"{score.context_length:,}",
            score.method,
            score.budget,
            f"{score.exact_match:.3f} {_error(score.exact_match_se, 3)}",
            f"{score.exact_match_loss:+.3f} {_error(score.exact_match_loss_se, 3)}",
            f"{score.kl:.4f} {_error(score.kl_se, 4)}",
            f"{score.kl_answer:.4f} {_error(score.kl_answer_se, 4)}",
            f"{score.kl_text:.4f} {_error(score.kl_text_se, 4)}",
            _percent(score.bytes_all),
            _percent(score.touched_all),
            f"{score.milliseconds_per_token:.1f}",
            _percent(score.touched_sparse),
            _number(score.recall, 3),
            _number(score.captured_mass, 3),
            _number(score.output_error, 4),
        )
    questions = sorted({score.questions for score in scores})
    contexts = sorted({score.contexts for score in scores})
    table.caption = (
        f"n = {', '.join(map(str, questions))} questions about {', '.join(map(str, contexts))} contexts without text "
        f"in common, which are the draws of ±{_without_error(scores)}; {_PROMPTS[prompts]}\n"
        "loss: exact match of full attention minus the method's; "
        "KL(full || method) in nats per token, of questions and answers, of answers alone, and of plain text: 0 is the "
        "same\nprobabilities as full attention; bytes, keys: read and attended by all layers, of those that full "
        "attention reads;\n* over the layers that search alone: keys attended, recall of the true top keys, attention "
        "mass captured, relative output error"
    )
    return table


WARN_KL = 0.1
"""Nats per token from full attention, from which on users are warned of a method."""


def warnings(scores: Sequence[Score]) -> list[str]:
    """A sentence for every method and budget whose tokens are far from those of full attention."""
    return [
        f"{score.method} at {score.budget} after {score.context_length:,} tokens is {score.kl:.2f} nats per token from "
        f"full attention: it captures {score.captured_mass:.0%} of the attention of the layers that search, and what "
        "stands for the rest does not make up for it on this model. Take another method (refined), keep more, or "
        "build its index with more subspaces or clusters"
        for score in scores
        if score.captured_mass is not None and score.kl > WARN_KL
    ]


def costs_table(scores: Sequence[Score]) -> Table | None:
    """What every method reads and takes; None where nothing searched."""
    rows = figures_of_costs(scores)
    if rows is None:
        return None
    table = Table(title="what a step reads, and what a token takes")
    for number, heading in enumerate(rows[0]):
        table.add_column(heading, justify="left" if number == 1 else "right", no_wrap=number == 1)
    for row in rows[1:]:
        table.add_row(*row)
    table.caption = _COSTS
    return table


_COSTS = (
    "over the layers that search, per step: bytes per token of context, and their share of keys' and values';\n"
    "of that the search of the index, what is attended exactly, and the remainder; memory per token: all layers,\n"
    "with the method's indexes and no others"
)


def figures_of_costs(scores: Sequence[Score]) -> list[list[str]] | None:
    """Heading and rows of the table of costs; None where nothing searched."""
    measured = [score for score in scores if score.search_share is not None]
    if not measured:
        return None
    return [
        ["context", "method", "budget", "bytes", "share", "search", "exact", "remainder", "device", "host"],
        *(
            [
                f"{score.context_length:,}",
                score.method,
                score.budget,
                _number(score.bytes_per_token, 1),
                _percent(score.bytes_share),
                _percent(score.search_share),
                _percent(score.exact_share),
                _percent(score.remainder_share),
                _number(score.device_bytes_per_token, 0),
                _number(score.host_bytes_per_token, 0),
            ]
            for score in measured
        ),
    ]


def markdown_table(scores: Sequence[Score], prompts: str) -> str:
    """The tables for a document: one row per length, method and budget.

    prompts: as of `results_table`.
    """
    headings = [
        "context",
        "method",
        "budget",
        "questions / contexts",
        "exact match",
        "KL",
        "KL, answer",
        "KL, text",
    ]
    headings += [
        "bytes",
        "keys",
        "keys, searching",
        "recall, searching",
        "mass, searching",
        "output error, searching",
    ]
    rows = [
        [
            f"{score.context_length:,}",
            f"`{score.method}`",
            score.budget,
            f"{score.questions} / {score.contexts}",
            f"{score.exact_match:.3f} {_error(score.exact_match_se, 3)}",
            f"{score.kl:.4f} {_error(score.kl_se, 4)}",
            f"{score.kl_answer:.4f} {_error(score.kl_answer_se, 4)}",
            f"{score.kl_text:.4f} {_error(score.kl_text_se, 4)}",
            _percent(score.bytes_all),
            _percent(score.touched_all),
            _percent(score.touched_sparse),
            f"{_number(score.recall, 3)} {_error(score.recall_se, 3)}",
            f"{_number(score.captured_mass, 3)} {_error(score.captured_mass_se, 3)}",
            f"{_number(score.output_error, 4)} {_error(score.output_error_se, 4)}",
        ]
        for score in scores
    ]
    said = _PROMPTS[prompts]
    lone = _without_error(scores)
    text = (
        f"± is the standard error with contexts without text in common as draws{lone}; {said}. Bytes and keys: of all "
        "layers, relative to what full attention reads. *Searching*: over the layers that search alone.\n\n"
    )
    text += _markdown([headings, *rows])
    costs = figures_of_costs(scores)
    if costs is not None:
        heading, *lines = costs
        text += f"\nWhat a step reads, and what a token takes; {_COSTS}:\n\n".replace(";\n", "; ")
        text += _markdown([heading, *([line[0], f"`{line[1]}`", *line[2:]] for line in lines)])
    return text


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.strip() for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def _without_error(scores: Sequence[Score]) -> str:
    """Says at which lengths there is no standard error, and why."""
    lengths = sorted({score.context_length for score in scores if score.contexts < 2})
    if not lengths:
        return ""
    return (
        f" (none at {', '.join(f'{length:,}' for length in lengths)} tokens: all questions are about one context, or "
        "about contexts that share text; a longer text, or shorter contexts, make more draws)"
    )


def _error(value: float | None, digits: int) -> str:
    return "" if value is None else f"±{value:.{digits}f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


FILES = ("results.json", "results.csv", "results.md")


@dataclass(frozen=True, slots=True)
class Results:
    """setting: everything that was measured with, as JSON. scores: what was measured."""

    setting: Mapping[str, Any]
    scores: Sequence[Score]

    @property
    def prompts(self) -> str:
        """What a question's tokens attended to: a value of `Prompts`, but not `auto`."""
        return str(self.setting["settings"]["prompts"])

    def as_json(self) -> dict[str, Any]:
        """The object that results.json holds."""
        return {**self.setting, "scores": [asdict(score) for score in self.scores]}


def write_results(folder: Path, results: Results) -> None:
    """Writes FILES, each replacing its predecessor at once."""
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, [field.name for field in fields(Score)])
    writer.writeheader()
    writer.writerows(asdict(score) for score in results.scores)
    contents = (
        json.dumps(results.as_json(), indent=2) + "\n",
        table.getvalue(),
        markdown_table(results.scores, results.prompts),
    )
    for name, content in zip(FILES, contents, strict=True):
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(content, encoding="utf-8", newline="")
        temporary.replace(folder / name)
