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

from decode_engine.evaluation.summary import ALL_TASKS, MassMap, Score

_PROMPTS = {
    "each": "each token of a question searches (prompts each: a CPU serves so unless told otherwise, a GPU exact)",
    "exact": "questions attend to the whole context (prompts exact: a GPU serves so unless told otherwise, a CPU each)",
    "sparse": "the tokens of a question share a search (prompts sparse)",
}
"""What is judged."""


def figures_of_quality(scores: Sequence[Score]) -> list[list[str]]:
    """Heading and rows, one per context length, method and budget; ± are standard errors."""
    headings = [
        "context",
        "method",
        "budget",
        "exact match",
        "loss",
        "KL",
        "KL answer",
        "KL text",
        "bytes",
        "keys",
    ]
    return [
        [*headings, "ms/token", "keys*", "recall*", "mass*", "error*"],
        *(
            [
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
                f"{_number(score.recall, 3)} {_error(score.recall_se, 3)}",
                f"{_number(score.captured_mass, 3)} {_error(score.captured_mass_se, 3)}",
                f"{_number(score.output_error, 4)} {_error(score.output_error_se, 4)}",
            ]
            for score in scores
            if score.task == ALL_TASKS
        ),
    ]


def quality_caption(scores: Sequence[Score], prompts: str) -> str:
    """What the figures of quality mean. prompts: what a question's tokens attended to, a value of `Prompts`."""
    scores = [score for score in scores if score.task == ALL_TASKS]
    questions = sorted({score.questions for score in scores})
    contexts = sorted({score.contexts for score in scores})
    return (
        f"n = {', '.join(map(str, questions))} questions about {', '.join(map(str, contexts))} contexts without text "
        f"in common, which are the draws of ±{_without_error(scores)}; {_PROMPTS[prompts]}\n"
        "loss: exact match of full attention minus the method's; "
        "KL(full || method) in nats per token, of questions and answers, of answers alone, and of plain text: 0 is the "
        "same\nprobabilities as full attention; bytes, keys: read and attended by all layers, of those that full "
        "attention reads;\n* over the layers that search alone: keys attended, recall of the true top keys, attention "
        "mass captured, relative output error"
    )


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
        if score.task == ALL_TASKS and score.captured_mass is not None and score.kl > WARN_KL
    ]


_COSTS = (
    "over the layers that search, per step: bytes per token of context, and their share of keys' and values';\n"
    "of that the search of the index, what is attended exactly, and the remainder; memory per token: all layers,\n"
    "with the method's indexes and no others"
)


def figures_of_costs(scores: Sequence[Score]) -> list[list[str]] | None:
    """Heading and rows of the table of costs; None where nothing searched."""
    measured = [score for score in scores if score.task == ALL_TASKS and score.search_share is not None]
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


def tables(scores: Sequence[Score], title: str, prompts: str) -> list[Table]:
    """For the terminal: quality, and what every method reads and takes, where something searched."""
    found = [_table(title, figures_of_quality(scores), quality_caption(scores, prompts))]
    if (by_task := figures_by_task(scores)) is not None:
        found.append(_table("exact match / KL by task", by_task, ""))
    if (costs := figures_of_costs(scores)) is not None:
        found.append(_table("what a step reads, and what a token takes", costs, _COSTS))
    return found


def figures_by_task(scores: Sequence[Score]) -> list[list[str]] | None:
    """Heading and rows of the table of tasks; None when a single task was asked."""
    tasks = list(dict.fromkeys(score.task for score in scores if score.task != ALL_TASKS))
    if not tasks:
        return None
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for score in scores:
        row = cells.setdefault((f"{score.context_length:,}", score.method, score.budget), {})
        exact = f"{score.exact_match:.3f} {_error(score.exact_match_se, 3)}".strip()
        row[score.task] = f"{exact} / {score.kl:.4f}"
    return [
        ["context", "method", "budget", *tasks],
        *([*key, *(row.get(task, "-") for task in tasks)] for key, row in cells.items()),
    ]


def _table(title: str, figures: Sequence[Sequence[str]], caption: str) -> Table:
    table = Table(title=title, caption=caption)
    for number, heading in enumerate(figures[0]):
        table.add_column(heading, justify="left" if number == 1 else "right", no_wrap=number in (1, 2))
    rows = figures[1:]
    for number, row in enumerate(rows):
        if number and rows[number - 1][0] != row[0]:
            table.add_section()
        table.add_row(*row)
    return table


def markdown_tables(scores: Sequence[Score], prompts: str) -> str:
    text = f"{quality_caption(scores, prompts)}\n\n{_markdown(figures_of_quality(scores))}"
    if (by_task := figures_by_task(scores)) is not None:
        text = f"{text}\nExact match / KL by task:\n\n{_markdown(by_task)}"
    costs = figures_of_costs(scores)
    return text if costs is None else f"{text}\n{_COSTS}\n\n{_markdown(costs)}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    heading, *others = rows
    named = [heading, *([row[0], f"`{row[1]}`", *row[2:]] for row in others)]
    lines = [f"| {' | '.join(cell.strip() for cell in row)} |" for row in named]
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
    """setting: everything that was measured with, as JSON. scores, maps: what was measured."""

    setting: Mapping[str, Any]
    scores: Sequence[Score]
    maps: Sequence[MassMap]

    @property
    def prompts(self) -> str:
        """What a question's tokens attended to: a value of `Prompts`, but not `auto`."""
        return str(self.setting["settings"]["prompts"])

    def as_json(self) -> dict[str, Any]:
        return {
            **self.setting,
            "scores": [asdict(score) for score in self.scores],
            "mass_maps": [asdict(found) for found in self.maps],
        }


def write_results(folder: Path, results: Results) -> None:
    """Writes FILES, each replacing its predecessor at once."""
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, [field.name for field in fields(Score)])
    writer.writeheader()
    writer.writerows(asdict(score) for score in results.scores)
    contents = (
        json.dumps(results.as_json(), indent=2) + "\n",
        table.getvalue(),
        markdown_tables(results.scores, results.prompts),
    )
    for name, content in zip(FILES, contents, strict=True):
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(content, encoding="utf-8", newline="")
        temporary.replace(folder / name)
