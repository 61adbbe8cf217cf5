"""Predictions over rows of fewer bits: float32 is the reference itself, and float8 is the farthest from it."""

from __future__ import annotations

import pytest
import typer

from tests.ops.bench.conftest import Run, load_bench


def test_rows_of_fewer_bits_are_farther_from_float32(run: Run) -> None:
    bench = load_bench("whole_model/rows_quality")
    cases = "full@float32,full@bfloat16,full@int8,full@float8,refined:0.05@bfloat16"
    found, code, _ = run(bench, context_length="1k", documents=2, facts=2, text_tokens=24, cases=cases)
    assert code == 0
    text = {line["case"]: line["kl_text"] for line in found}
    assert text["full@float32"] < 1
    assert text["full@bfloat16"] < text["full@float8"] / 4
    assert text["full@int8"] < text["full@float8"] / 4
    assert text["refined:0.05@bfloat16"] < text["full@float8"]
    assert all(line["questions"] == 4 and line["kl_text_se"] >= 0 for line in found)


def test_rows_that_nobody_keeps_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="expected METHOD@ROWS"):
        load_bench("whole_model/rows_quality").parse_case("full@int4")
