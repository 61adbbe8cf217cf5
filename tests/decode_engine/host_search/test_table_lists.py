"""Parts of the search that threads share: bounds that leave enough keys, and the best of what is left."""

from __future__ import annotations

import numpy as np
import pytest

from decode_engine.host_search.table_lists_numba import (
    BINS,
    best_listed,
    count_blocks,
    fold_of,
    list_reaching,
    lower_bound,
)
from index_store.indexes.query_tables.search_numba import TILE


@pytest.mark.parametrize("case", ["spread", "negative", "equal", "weights", "few"])
def test_a_bound_leaves_the_keys_that_are_kept_and_few_others(case: str) -> None:
    rng = np.random.default_rng(3)
    keys, keep = 3 * TILE - 500, 400
    scores = rng.normal(0, 1, keys).astype(np.float32)
    reach = np.float32(8)
    if case == "negative":
        scores -= 3
    elif case == "equal":
        scores[:] = 0.25
    elif case == "weights":
        scores, reach = np.exp(4 * scores - 20).astype(np.float32), np.float32(0)
    elif case == "few":
        keep = keys // 2
    parts = [scores[first : first + TILE] for first in range(0, keys, TILE)]
    histograms = np.empty((len(parts), BINS), np.int32)
    bins = np.empty(2 * TILE, np.int32)
    for part, histogram in zip(parts, histograms, strict=True):
        count_blocks(part, fold_of(keys, keep), reach, bins, histogram)
    bound = lower_bound(histograms, keep, reach)
    reaching = int((scores >= bound).sum())
    assert reaching >= keep
    if case != "equal":
        assert reaching < 1.4 * keep
    ids, listed = np.empty(3 * TILE, np.int32), np.empty(3 * TILE, np.float32)
    words = np.empty(TILE // 32 + 2, np.uint64)
    counts = np.zeros(len(parts), np.int64)
    for number, part in enumerate(parts):
        first = number * TILE
        own = slice(first, first + len(part))
        counts[number] = list_reaching(part, bound, first, words, ids[own], listed[own])
    out = np.empty(keys, np.int32)
    kept = best_listed(ids, listed, counts, keep, out)
    # A stable sort gives ties to lower ids.
    expected = np.sort(np.argsort(-scores, kind="stable")[:keep])
    assert np.array_equal(out[:kept], expected)
