"""Results are written whole, shown and drawn."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from decode_engine.evaluation.pictures import (
    COSTS,
    MASS_MAP,
    QUALITY,
    draw_pictures,
    pareto_front,
)
from decode_engine.evaluation.results import figures_by_task, tables, warnings, write_results
from decode_engine.evaluation.summary import ALL_TASKS
from tests.decode_engine.evaluation.evaluation_samples import some_results, some_scores


def test_results_hold_every_score(tmp_path: Path) -> None:
    results = some_results()
    write_results(tmp_path, results)
    write_results(tmp_path, results)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.json", "results.md"]
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(results.as_json()))
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["kl"]) for row in rows] == [score.kl for score in results.scores]
    blocks = (tmp_path / "results.md").read_text().split("\n\n")
    tables = [block.splitlines() for block in blocks if block.startswith("|")]
    assert [len(table) for table in tables] == [2 + 6, 2 + 6, 2 + 4]
    assert all(len({line.count("|") for line in table}) == 1 for table in tables)


def test_tables_on_the_terminal(tmp_path: Path) -> None:
    scores = some_scores()
    console = Console(width=200, record=True, file=(tmp_path / "table").open("w"))
    for table in tables(scores, "title", "exact"):
        console.print(table)
    text = console.export_text()
    assert text.count("csattention") == 12
    assert "20.0% │   2.0% │ 10.0% │      8.0%" in text.replace("\u2502", "│")
    assert "n = 2 questions about 2 contexts" in text
    assert "prompts exact" in text
    assert "keys" in text
    assert figures_by_task([score for score in scores if score.task == ALL_TASKS]) is None


def test_many_methods_are_drawn(tmp_path: Path) -> None:
    results = some_results([*(f"method-{number}" for number in range(13)), "csattention"])
    names = draw_pictures(tmp_path, results.scores, results.maps)
    assert names == [QUALITY, COSTS, MASS_MAP]
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    only_full = [score for score in results.scores if score.method == "full"]
    assert draw_pictures(tmp_path, only_full, []) == [QUALITY]


def test_the_front_holds_what_nothing_beats() -> None:
    points = [(3.0, 0.1), (1.0, 0.5), (2.0, 0.6), (4.0, 0.1), (1.0, 0.7), (5.0, 0.01)]
    assert pareto_front(points) == [(1.0, 0.5), (3.0, 0.1), (5.0, 0.01)]
    assert pareto_front([]) == []


def test_results_are_replaced_as_a_whole(tmp_path: Path) -> None:
    results = some_results()
    write_results(tmp_path, results)
    (tmp_path / "results.json").chmod(0o444)
    write_results(tmp_path, results)  # replaced as a whole, not written into
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(results.as_json()))


def test_a_method_far_from_full_attention_is_warned_of() -> None:
    score = some_scores()[0]
    near = replace(score, task=ALL_TASKS, captured_mass=0.47, kl=0.05)
    far = replace(near, kl=0.59)
    assert warnings([near, replace(far, task="single"), replace(far, captured_mass=None)]) == []
    (said,) = warnings([near, far])
    assert said.startswith(
        f"{score.method} at {score.budget} after {score.context_length:,} tokens is 0.59 nats"
    )
    assert "captures 47% of the attention" in said
