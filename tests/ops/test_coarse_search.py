"""The benchmark of coarse searches ranks keys as query tables do, and counts lines that are read."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from index_store.methods.index_specs import INDEX_SPECS
from tests.decode_engine.host_search.searches import DIM, GROUP, HEADS, Layer
from tests.ops.scripts import load_script

BENCH = Path(__file__).resolve().parents[2] / "ops" / "bench" / "coarse_search.py"
KEYS = 300


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(BENCH)


def test_keys_are_scored_as_by_query_tables(bench: ModuleType) -> None:
    assert INDEX_SPECS["query_tables"].parameters["split"] == "strided"
    layer = Layer(KEYS, 3)
    q_HTGD = torch.randn(HEADS, 7, GROUP, DIM, generator=torch.Generator().manual_seed(4))
    options = {"group": "pooled", "weights": "projection"}
    ranking = layer.index.rank(q_HTGD, 0, KEYS, None, options)
    for h in range(HEADS):
        tables = [layer.arrays[name][h] for name in ("centroids", "scales", "scores")]
        found = bench.table_scores(q_HTGD[h].mean(1), *tables)
        torch.testing.assert_close(found, ranking.logits_HTGM[h, :, 0], rtol=1e-4, atol=1e-3)


def test_a_line_is_read_when_one_of_its_keys_survives(bench: ModuleType) -> None:
    survive_QN = torch.zeros(2, 4 * bench.LINE_BYTES + 5, dtype=torch.bool)
    survive_QN[0, [0, 1, 70]] = True
    survive_QN[1, -1] = True  # in no whole line
    assert bench.lines(survive_QN) == 2 / 8
