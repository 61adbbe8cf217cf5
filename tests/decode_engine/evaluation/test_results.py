"""Results are written whole, read back, shown, drawn, and merged when they belong together."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from decode_engine.evaluation.pictures import (
    COSTS,
    MASS_MAP,
    QUALITY,
    draw_pictures,
    pareto_front,
)
from decode_engine.evaluation.results import (
    Results,
    costs_table,
    markdown_table,
    merge_results,
    read_results,
    results_table,
    tasks_table,
    warnings,
    write_results,
)
from decode_engine.evaluation.summary import ALL_TASKS, Score
from index_store.errors import InvalidArgumentError
from tests.decode_engine.evaluation.evaluation_samples import SETTING, some_results, some_scores


def test_results_hold_every_score(tmp_path: Path) -> None:
    results = some_results()
    write_results(tmp_path, results)
    write_results(tmp_path, results)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.json", "results.md"]
    read = read_results(tmp_path)
    assert read == results
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
    console.print(results_table(scores, "title", "exact"))
    by_task = tasks_table(scores)
    assert by_task is not None
    console.print(by_task)
    costs = costs_table(scores)
    assert costs is not None
    console.print(costs)
    text = console.export_text()
    assert text.count("csattention") == 12
    assert "20.0% │   2.0% │ 10.0% │      8.0%" in text.replace("\u2502", "│")
    assert "n = 2 questions about 2 contexts" in text
    assert "prompts exact" in text
    assert "keys" in text
    assert tasks_table([score for score in scores if score.task == "all"]) is None


def test_tables_say_where_there_is_no_standard_error() -> None:
    def told(scores: Sequence[Score]) -> str:
        return f"{results_table(scores, 'title', 'exact').caption} {markdown_table(scores, 'exact')}"

    scores = some_scores()
    assert "none at" not in told(scores)
    lone = [replace(score, contexts=1, exact_match_se=None) for score in scores]
    assert (
        told(lone).count("tokens: all questions are about one context, or about contexts that share text")
        == 2
    )


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


def test_results_from_before_costs_were_told_are_read(tmp_path: Path) -> None:
    write_results(tmp_path, some_results())
    content = json.loads((tmp_path / "results.json").read_text())
    for row in content["scores"]:
        for name in ("search_share", "exact_share", "remainder_share", "bytes_per_token"):
            del row[name]
        del row["device_bytes_per_token"], row["host_bytes_per_token"]
    (tmp_path / "results.json").write_text(json.dumps(content))
    old = read_results(tmp_path)
    assert [score.kl for score in old.scores] == [score.kl for score in some_scores()]
    assert costs_table(old.scores) is None
    assert COSTS not in draw_pictures(tmp_path, old.scores, old.maps)


def test_results_are_replaced_as_a_whole(tmp_path: Path) -> None:
    results = some_results()
    write_results(tmp_path, results)
    (tmp_path / "results.json").chmod(0o444)
    write_results(tmp_path, results)  # replaced as a whole, not written into
    assert read_results(tmp_path / "results.json") == results


def merged(tmp_path: Path, *runs: Results) -> Results:
    folders = []
    for number, run in enumerate(runs):
        folder = tmp_path / f"run{number}"
        folder.mkdir(exist_ok=True)
        write_results(folder, run)
        folders.append(folder)
    return merge_results(folders)


def test_runs_of_other_methods_merge(tmp_path: Path) -> None:
    first, second = (
        some_results(["oracle", "refined"]),
        some_results(["quest", "refined"], out="b", keep=[0.05, 0.1]),
    )
    both = merged(tmp_path, first, second)
    assert both.setting["settings"]["methods"] == ["oracle", "refined", "quest"]
    assert both.setting["settings"]["keep"] == [0.02, 0.05, 0.1]
    assert both.setting["complete"] is True
    expected = some_results(["oracle", "refined", "quest"])
    assert both.scores == expected.scores
    assert {(m.context_length, m.method, m.budget) for m in both.maps} == {
        (m.context_length, m.method, m.budget) for m in expected.maps
    }
    write_results(tmp_path, both)
    assert read_results(tmp_path) == both
    unfinished = replace(second, setting={**second.setting, "complete": False})
    assert merged(tmp_path, first, unfinished).setting["complete"] is False


def test_runs_from_before_a_setting_was_there_merge(tmp_path: Path) -> None:
    old = some_results(["oracle"])
    new = some_results(["refined"], attention="exact", index=[], prompts="each")
    assert {score.method for score in merged(tmp_path, old, new).scores} == {"full", "oracle", "refined"}


def test_runs_with_approximate_prefill_merge(tmp_path: Path) -> None:
    """Full attention may answer worse after it than after an exact prefill, in every run alike."""
    run = some_results(["oracle"])
    after = [
        replace(score, method="full after muse", exact_match=0.25)
        for score in run.scores
        if score.budget == "all"
    ]
    run = replace(run, scores=[*run.scores, *after])
    assert after
    assert len(merged(tmp_path, run, run).scores) == len(run.scores)
    other = replace(
        run, scores=[replace(score, exact_match=0.5) if score in after else score for score in run.scores]
    )
    with pytest.raises(InvalidArgumentError, match="not the same questions"):
        merged(tmp_path, run, other)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"context_lengths": [8192]}, r"context_lengths is \[8192, 32768\] in one and \[8192\] in the other"),
        ({"seed": 3}, "seed is 0 in one and 3 in the other"),
        ({"questions": 4}, "questions is 2"),
        ({"tasks": ["single"]}, "tasks is"),
        ({"attention": "muse"}, "attention is 'exact' in one and 'muse' in the other"),
    ],
)
def test_runs_of_other_questions_do_not_merge(
    setting: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        merged(tmp_path, some_results(["oracle"]), some_results(["refined"], **setting))


def test_runs_of_another_model_or_with_other_answers_do_not_merge(tmp_path: Path) -> None:
    first, second = some_results(["oracle"]), some_results(["refined"])
    other_model = SETTING | {"model": {"name": "other", "fingerprint": "f01"}}
    for change, message in (
        ({"setting": other_model}, "model is 'reader' in one and 'other' in the other"),
        ({"setting": SETTING | {"text_sha256": "ff"}}, "text is '0123456789ab' in one and 'ff' in the other"),
        (
            {"scores": [replace(score, exact_match=0.5) for score in second.scores]},
            "these were not the same questions",
        ),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            merged(tmp_path, first, replace(second, **change))
    with pytest.raises(InvalidArgumentError, match="no results to merge"):
        merge_results([])


@pytest.mark.parametrize("content", ["", "[]", '{"scores": []}', '{"scores": [{"kl": 1}], "mass_maps": []}'])
def test_what_are_no_results_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(InvalidArgumentError, match=r"results\.json holds no results of this version"):
        read_results(tmp_path)


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


def test_indexes_that_do_not_fit_are_told_once_by_merged_runs(tmp_path: Path) -> None:
    first, second = some_results(["oracle"]), some_results(["refined"])
    told = replace(first, setting={**first.setting, "misfits": ["index a: wide"]})
    assert merged(tmp_path, told, second).setting["misfits"] == ["index a: wide"]
