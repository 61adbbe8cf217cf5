"""Layers that are waited for while others are still loaded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from index_store.memory.resident import LayerGate

SOON = 10.0


def test_gate() -> None:
    gate = LayerGate(2)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(gate.wait, layer) for layer in (0, 1, 1)]
        gate.open_next()
        waiting[0].result(SOON)
        assert not gate.complete
        gate.fail(ValueError("first"))
        gate.fail(ValueError("second"))
        errors = [future.exception(SOON) for future in waiting[1:]]
    assert [str(error) for error in errors] == ["first", "first"]
    assert errors[0] is not errors[1]
    gate.wait(0)
    with pytest.raises(ValueError, match="first"):
        gate.wait_for_all()
