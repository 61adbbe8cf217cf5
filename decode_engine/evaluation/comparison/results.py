"""Results of an evaluation as files: written whole or not at all, read, and merged.

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

from decode_engine.evaluation.comparison.summary import ALL_TASKS, MassMap, Score
from decode_engine.evaluation.comparison.tables import markdown_table
from index_store.errors import InvalidArgumentError

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
