"""The benchmark of reused rows counts what was listed before, what slots hold, and what was foretold."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from decode_engine.layers.selected_attention import KeyRows
from decode_engine.layers.sparse_layer import Observation
from index_store.selection.budgets import Selection
from tests.ops.scripts import load_script

BENCH = Path(__file__).resolve().parents[2] / "ops" / "bench" / "row_reuse.py"
KEYS, SINKS = 64, 2


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(BENCH)


def seen(ids: list[int]) -> Observation:
    """A step that lists these keys; ids from KEYS on are the session's own. Key n's weight grows with n."""
    kv = torch.linspace(0.0, 3.0, KEYS + 8)[None, :, None, None].expand(1, -1, 2, 1)
    selection = Selection(torch.tensor([[ids]]), torch.tensor([[len(ids)]]))
    q = torch.ones(1, 1, 1, 1)
    return Observation(
        q, KEYS + 7, SINKS, KEYS + 4, selection, KeyRows(kv[:, :KEYS], kv[:, KEYS:]), q, 0.0, 0.0
    )


def test_what_was_listed_before_is_counted(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With three slots: of 3, 4, 9 in the second step 3 and 4 were listed before; 9 took the slot of 2."""
    monkeypatch.setattr(bench, "slots_per_head", lambda tokens: 3)
    counts = bench.Counts()
    counts.add(0, seen([2, 3, 4, KEYS + 1]), None, counted=False)
    counts.add(0, seen([3, 4, 9]), None, counted=True)
    counts.add(0, seen([9, 2, 3, 30]), None, counted=True)
    assert (counts.listed, counts.again, counts.in_slots) == (7, 2 + 2, 2 + 2)
    counts.add(0, seen([4]), None, counted=True)
    assert (counts.listed, counts.again, counts.in_slots) == (8, 4, 4)
    assert counts.ahead == 0


@pytest.mark.parametrize(("sign", "foretold", "either"), [(1.0, 2, 3), (-1.0, 1, 1)])
def test_what_was_foretold_is_counted(bench: ModuleType, sign: float, foretold: int, either: int) -> None:
    """The best three of the searched range are 61 to 63, or 2 to 4 for the opposite queries."""
    counts = bench.Counts()
    query = torch.full((1, 1, 1, 1), sign)
    counts.add(1, seen([3]), query, counted=False)
    counts.add(1, seen([3, 62, 63]), query, counted=True)
    assert (counts.ahead, counts.foretold, counts.either) == (3, foretold, either)


@pytest.mark.slow
def test_a_line_per_share_of_keys(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench.main(tmp_path, "pq", "1k", 3, 1, "0.05,1.0", "reader", 0)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["keep"] for row in rows] == [0.05, 1.0]
    assert all(
        0.0 <= row[name] <= 1.0 for row in rows for name in ("again", "in_slots", "foretold", "either")
    )
    assert rows[1]["again"] == rows[1]["foretold"] == 1.0
