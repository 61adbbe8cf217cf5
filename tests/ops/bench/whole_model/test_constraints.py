"""The benchmark of constraints: its answers validate, and one that does not ends it."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from tests.ops.bench.conftest import load_bench


def test_answers_to_random_schemas_validate(capsys: pytest.CaptureFixture[str]) -> None:
    bench = load_bench("whole_model/constraints")
    bench.main(schemas=6, tokens=40)
    line = json.loads(capsys.readouterr().out)
    assert line["finished"] >= 2
    assert line["valid"] == line["finished"]
    assert line["choose_us"] > 0


def test_a_wrong_answer_is_found() -> None:
    bench = load_bench("whole_model/constraints")
    for text in ("[1, 2", '{"a": "b"}'):
        with pytest.raises(bench.CheckFailedError):
            bench.check({"type": "object", "properties": {"a": {"type": "integer"}}}, text)


def test_schemas_are_schemas() -> None:
    load_bench("whole_model/constraints")
    from harness.made_up.random_schemas import random_schema

    schemas = [random_schema(random.Random(seed)) for seed in range(100)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert len({json.dumps(schema) for schema in schemas}) > 80
