"""Sessions that begin with stored rows go on as the sessions did that these rows are from."""

from __future__ import annotations

from pathlib import Path

import pytest

from index_store.methods.presets import get_method
from tests.decode_engine.model.test_layer_kinds import serve
from tests.support.devices import nightly

METHODS = ("full", "csattention", "csattention-paper", "multipole-tree")


@pytest.mark.parametrize("kind", ["windows", "sinks", *nightly("windows only")])
def test_a_restored_session_goes_on_as_the_one_before(tmp_path: Path, kind: str) -> None:
    """Bit for bit, whatever pieces the rows come in, also where windows have passed the first of them."""
    with serve(tmp_path, kind, METHODS[1:]) as kept:
        runner, context = kept.runner, kept.context
        tokens = runner.tokenizer.encode("\nQuestion: who lit it?\nAnswer: the keeper of the harbour " * 2)
        for name in METHODS:
            options = "" if name == "full" else "@append_block=16@recent=16"
            fitted = get_method(name + options).on(context.manifest)
            first, again = (runner.start(context, fitted) for _ in range(2))
            for start in range(0, len(tokens), 10):
                runner.read([first], [tokens[start : start + 10]])
            rows = [layer.clone() for layer in first.tail_rows()]
            for start, end in ((0, 1), (1, 17), (17, 40), (40, len(tokens))):
                runner.restore(again, [layer[:, start:end] for layer in rows])
            assert again.position == first.position
            for token in tokens[:10]:
                expected = runner.forward([first], [[token]])[0]
                assert runner.forward([again], [[token]])[0].equal(expected), (kind, name)
            assert all(a.equal(b) for a, b in zip(again.tail_rows(), first.tail_rows(), strict=True))
