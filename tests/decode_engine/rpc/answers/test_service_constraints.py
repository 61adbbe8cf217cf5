"""Answers that have to be something: JSON of a schema, a regular expression's text, one of a few texts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from decode_engine.rpc.client import Client
from index_store.errors import InvalidArgumentError

PROMPT = "Who lit the lamp of the grey harbour?"
SCHEMA = {
    "type": "object",
    "properties": {
        "lit": {"type": "boolean"},
        "ships": {"type": "integer", "minimum": 3, "maximum": 99},
        "keepers": {"type": "array", "items": {"enum": ["Ada", "Émile"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["lit", "ships", "keepers"],
    "additionalProperties": False,
}


def test_sessions_with_and_without_constraints_share_a_batch(client: Client, lamp: str) -> None:
    def ask(constrained: bool) -> str:
        options: dict[str, Any] = {"json_schema": SCHEMA, "max_tokens": 120} if constrained else {}
        return client.generate(lamp, text=PROMPT, **{"max_tokens": 40, **options}).read()

    alone = {constrained: ask(constrained) for constrained in (True, False)}
    before = client.server_status()
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(ask, [True, False] * 4))
    after = client.server_status()
    assert together == [alone[True], alone[False]] * 4
    assert after.decode_tokens - before.decode_tokens > 1.5 * (after.decode_steps - before.decode_steps)


def test_what_would_take_for_ever_is_refused_and_harms_nobody(
    client: Client, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = client.generate(lamp, text=PROMPT, max_tokens=20).read()
    hostile = {"type": "integer", "multipleOf": 99_999_989}
    with ThreadPoolExecutor(2) as threads, monkeypatch.context() as patch:
        patch.setattr("decode_engine.engine.sampling.constraints._TRIAL_S", 2.0)
        refused = threads.submit(client.generate(lamp, text=PROMPT, json_schema=hostile).read)
        assert client.generate(lamp, text=PROMPT, max_tokens=20).read() == expected
        with pytest.raises(InvalidArgumentError, match="too complex"):
            refused.result()
    assert client.generate(lamp, text=PROMPT, regex="[ab]").read() in "ab"
