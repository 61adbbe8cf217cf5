"""Results of an evaluation: tables for the terminal and for a document, and files, written whole, read and merged.

A long evaluation writes them again and again, so whoever stops it keeps what is done.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from decode_engine.evaluation.summary import ALL_TASKS, MassMap, Score
from index_store.errors import InvalidArgumentError

_PROMPTS = {
    "each": "each token of a question searches (prompts each: a CPU serves so unless told otherwise, a GPU exact)",
    "exact": "questions attend to the whole context (prompts exact: a GPU serves so unless told otherwise, a CPU each)",
    "sparse": "the tokens of a question share a search (prompts sparse)",
}
"""What is judged."""


def results_table(scores: Sequence[Score], title: str, prompts: str) -> Table:
    """One line per context length, method and budget, all tasks together; +- are standard errors.

    prompts: what a question's tokens attended to, a value of `Prompts`.
    """
    table = Table(title=title)
    table.add_column("context", justify="right")
    table.add_column("method", no_wrap=True)
    headings = ("budget", "exact match", "loss", "KL", "KL answer", "KL text", "bytes", "keys", "ms/token")
    for heading in (*headings, "keys*", "recall*", "mass*", "error*"):
        table.add_column(heading, justify="right", no_wrap=heading == "budget")
    overall = [score for score in scores if score.task == ALL_TASKS]
    previous = None
    for score in overall:
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
    questions = sorted({score.questions for score in overall})
    contexts = sorted({score.contexts for score in overall})
    table.caption = (
        f"n = {', '.join(map(str, questions))} questions about {', '.join(map(str, contexts))} contexts without text "
        f"in common, which are the draws of ±{_without_error(overall)}; {_PROMPTS[prompts]}\n"
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
        if score.task == ALL_TASKS and score.captured_mass is not None and score.kl > WARN_KL
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


def tasks_table(scores: Sequence[Score]) -> Table | None:
    """Exact match and KL by task, one column per task; None when a single task was asked."""
    rows = figures_by_task(scores)
    if rows is None:
        return None
    table = Table(title="exact match / KL by task")
    for number, heading in enumerate(rows[0]):
        table.add_column(heading, justify="left" if number == 1 else "right", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    return table


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


def markdown_table(scores: Sequence[Score], prompts: str) -> str:
    """The tables for a document: one row per length, method and budget; exact match and KL by task below.

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
        if score.task == ALL_TASKS
    ]
    said = _PROMPTS[prompts]
    lone = _without_error([score for score in scores if score.task == ALL_TASKS])
    text = (
        f"± is the standard error with contexts without text in common as draws{lone}; {said}. Bytes and keys: of all "
        "layers, relative to what full attention reads. *Searching*: over the layers that search alone.\n\n"
    )
    text += _markdown([headings, *rows])
    for title, found in (
        ("Exact match / KL by task:", figures_by_task(scores)),
        (
            f"What a step reads, and what a token takes; {_COSTS}:".replace("\n", " "),
            figures_of_costs(scores),
        ),
    ):
        if found is not None:
            heading, *lines = found
            text += f"\n{title}\n\n"
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
_LATER_SETTINGS = {
    "index": [],
    "attention": "exact",
    "prompts": "each",
    "placement": "auto",
    "weights": "float32",
}
"""What settings were before there was a choice: older runs do not name them."""
_FREE_SETTINGS = frozenset({"out", "store", "methods", "keep", "mass", "index_for"})
"""Settings in which merged runs may differ; `text` is compared by its content, the model by its fingerprint."""

_Row = TypeVar("_Row", Score, MassMap)


@dataclass(frozen=True, slots=True)
class Results:
    """setting: everything that was measured with, as JSON. scores, maps: what was measured."""

    setting: Mapping[str, Any]
    scores: Sequence[Score]
    maps: Sequence[MassMap]

    @property
    def prompts(self) -> str:
        """What a question's tokens attended to: a value of `Prompts`, but not `auto`."""
        return str({**_LATER_SETTINGS, **self.setting["settings"]}["prompts"])

    def as_json(self) -> dict[str, Any]:
        """The object that results.json holds."""
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
        markdown_table(results.scores, results.prompts),
    )
    for name, content in zip(FILES, contents, strict=True):
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(content, encoding="utf-8", newline="")
        temporary.replace(folder / name)


def read_results(path: Path) -> Results:
    """What `write_results` wrote; `path` is results.json or its folder.

    Raises InvalidArgumentError for a file that holds something else, OSError when there is none.
    """
    file = path / FILES[0] if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        scores = [Score(**row) for row in content.pop("scores")]
        maps = [_map(row) for row in content.pop("mass_maps")]
        for field in ("settings", "model", "machine", "text_sha256"):
            content[field]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(
            f"{file} holds no results of this version of decode-engine evaluate ({type(error).__name__}: {error}); "
            "run the evaluation again"
        ) from error
    return Results(content, scores, maps)


def _map(row: Mapping[str, Any]) -> MassMap:
    captured = tuple(tuple(line) for line in row["captured"])
    return MassMap(**{**row, "layers": tuple(row["layers"]), "captured": captured})


def merge_results(paths: Sequence[Path]) -> Results:
    """Results of several runs of one setting, which differ in methods and budgets only.

    Raises InvalidArgumentError when they asked different questions or another model, or when full attention did not
    answer them alike.
    """
    if not paths:
        raise InvalidArgumentError("no results to merge; name the folders of two or more runs")
    runs = [read_results(path) for path in paths]
    for path, run in zip(paths[1:], runs[1:], strict=True):
        _require_same(paths[0], runs[0], path, run)
    _require_same_answers(paths, runs)
    scores = _unique(score for run in runs for score in run.scores)
    maps = _unique(found for run in runs for found in run.maps)
    lengths = list(runs[0].setting["settings"]["context_lengths"])
    tasks = [ALL_TASKS, *runs[0].setting["settings"]["tasks"]]
    scores.sort(key=lambda score: (lengths.index(score.context_length), tasks.index(score.task)))
    names = ("methods", "keep", "mass", "index_for")
    settings = {
        **runs[0].setting["settings"],
        **{name: list(dict.fromkeys(v for r in runs for v in r.setting["settings"][name])) for name in names},
    }
    merged = {
        **runs[0].setting,
        "settings": settings,
        "misfits": sorted({reason for run in runs for reason in run.setting.get("misfits", [])}),
        "complete": all(run.setting.get("complete", False) for run in runs),
        "machines": [run.setting["machine"] for run in runs],
    }
    return Results(merged, scores, maps)


def _unique(rows: Iterable[_Row]) -> list[_Row]:
    """One row per method, budget, task and length: that over more questions when several runs have it."""
    found: dict[tuple[object, ...], _Row] = {}
    for row in rows:
        key = (row.context_length, getattr(row, "task", None), row.method, row.budget)
        known = found.get(key)
        if known is None or getattr(row, "questions", 0) > getattr(known, "questions", 0):
            found[key] = row
    return list(found.values())


def _require_same_answers(paths: Sequence[Path], runs: Sequence[Results]) -> None:
    """Full attention is measured by every run: equal questions have equal answers."""
    seen: dict[tuple[object, ...], tuple[float, Path]] = {}
    for path, run in zip(paths, runs, strict=True):
        for score in run.scores:
            if score.budget != "all":
                continue
            key = (score.method, score.context_length, score.task, score.questions)
            value, first = seen.setdefault(key, (score.exact_match, path))
            if abs(value - score.exact_match) > 1e-9:
                raise InvalidArgumentError(
                    f"{first} and {path} cannot be merged: full attention's exact match is {value:.4f} in one and "
                    f"{score.exact_match:.4f} in the other over {score.questions} questions after "
                    f"{score.context_length} tokens, so these were not the same questions"
                )


def _require_same(first: Path, one: Results, second: Path, other: Results) -> None:
    settings = [{**_LATER_SETTINGS, **run.setting["settings"]} for run in (one, other)]
    differing = [
        (name, *(own.get(name) for own in settings))
        for name in sorted({*settings[0], *settings[1]} - _FREE_SETTINGS - {"text", "model"})
        if settings[0].get(name) != settings[1].get(name)
    ]
    models = [run.setting["model"]["fingerprint"] for run in (one, other)]
    if models[0] != models[1]:
        differing.insert(0, ("model", *(run.setting["model"]["name"] for run in (one, other))))
    if one.setting["text_sha256"] != other.setting["text_sha256"]:
        differing.append(("text", one.setting["text_sha256"][:12], other.setting["text_sha256"][:12]))
    if differing:
        name, here, there = differing[0]
        raise InvalidArgumentError(
            f"{first} and {second} cannot be merged: {name} is {here!r} in one and {there!r} in the other; "
            "only methods and budgets may differ"
        )
