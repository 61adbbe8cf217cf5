"""Compiled loops over query tables, dense and in lists, equal the general path."""

from __future__ import annotations

import pytest
import torch

from index_store.indexes.query_tables.search_numba import (
    Lists,
    TableReads,
    insert_keys,
    insert_keys_reference,
    score_lists,
    score_lists_reference,
    softmax_sum_rows,
    softmax_sum_rows_reference,
    sum_rows,
    sum_rows_reference,
)


def some_lists(seed: int, capacity: int = 30, keys: int = 100) -> Lists:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-500, 500, (2, 6, keys), dtype=torch.int16, generator=generator)
    top = values.float().topk(capacity, dim=-1, sorted=True)
    return Lists(
        top.indices.to(torch.int32),
        top.values.to(torch.int16),
        torch.full((2, 6), capacity, dtype=torch.int32),
        torch.zeros(2, 6, 200, dtype=torch.int32),
        torch.zeros(2, 6, 200, dtype=torch.int16),
        torch.zeros(2, 6, dtype=torch.int32),
    )


@pytest.mark.parametrize("seed", range(5))
def test_insert_keys_equals_reference_and_never_grows(seed: int) -> None:
    lists, expected = some_lists(seed), some_lists(seed)
    scores = torch.randint(
        -600, 700, (2, 150, 6), dtype=torch.int16, generator=torch.Generator().manual_seed(seed)
    )
    for begin in (0, 1, 70):
        block = scores[:, begin : {0: 1, 1: 70, 70: 150}[begin]].contiguous()
        insert_keys(lists, block, 100 + begin)
        insert_keys_reference(expected, block, 100 + begin)
    assert torch.equal(lists.kept_HS, expected.kept_HS)
    assert torch.equal(lists.inserted_HS, expected.inserted_HS)
    assert (lists.kept_HS + lists.inserted_HS == 30).all()
    filled = torch.arange(200) < lists.inserted_HS[..., None]
    assert torch.equal(lists.inserted_values_HSE[filled], expected.inserted_values_HSE[filled])
    assert torch.equal(lists.inserted_ids_HSE[filled], expected.inserted_ids_HSE[filled])


@pytest.mark.parametrize("floor_missing", [True, False])
@pytest.mark.parametrize(("first", "columns"), [(0, 250), (8, 130)])
def test_score_lists_equals_reference(floor_missing: bool, first: int, columns: int) -> None:
    lists = some_lists(7)
    generator = torch.Generator().manual_seed(3)
    insert_keys(lists, torch.randint(0, 700, (2, 90, 6), dtype=torch.int16, generator=generator), 100)
    rows = torch.randint(0, 6, (2, 4, 3), dtype=torch.int32, generator=generator)
    weights = torch.rand(2, 4, 3, generator=generator)
    weights[0, 1] = 0.0
    out = torch.full((2, 4, columns), torch.nan)
    expected = out.clone()
    score_lists(lists, rows, weights, first, floor_missing, out)
    score_lists_reference(lists, rows, weights, first, floor_missing, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-2)


def some_reads(picks: int, first: int, end: int, group: int = 3, scale: float = 0.02) -> TableReads:
    """Tables of 40,003 context keys and 5,000 appended ones, with slack after each row as growing buffers have."""
    generator = torch.Generator().manual_seed(picks)
    tables, appended = (
        torch.randint(-127, 128, (2, 40, size), dtype=torch.int8, generator=generator)
        for size in (40_010, 5_008)
    )
    rows = torch.randint(0, 40, (2, 2, group, picks), dtype=torch.int32, generator=generator)
    weights = torch.randn(2, 2, group, picks, generator=generator) * scale
    return TableReads(tables[..., :40_003], appended[..., :5_000], rows, weights, first, end)


RANGES = [(0, 1), (3, 4999), (0, 40_003), (2047, 2050), (39_000, 45_003), (40_003, 40_100), (41_000, 44_000)]


@pytest.mark.parametrize("picks", [1, 4, 7, 16])
@pytest.mark.parametrize(("first", "end"), RANGES)
def test_sum_rows_equals_reference(picks: int, first: int, end: int) -> None:
    reads = some_reads(picks, first, end)
    torch.testing.assert_close(sum_rows(reads), sum_rows_reference(reads), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("scale", [0.0, 0.01, 0.3])
@pytest.mark.parametrize(("first", "end"), RANGES)
def test_softmax_sum_rows_equals_reference(group: int, scale: float, first: int, end: int) -> None:
    reads = some_reads(8, first, end, group, scale)
    expected = softmax_sum_rows_reference(reads)
    torch.testing.assert_close(softmax_sum_rows(reads), expected, rtol=1e-3, atol=1e-7)


def test_an_empty_range_gives_empty_scores() -> None:
    reads = some_reads(4, 7, 7)
    assert sum_rows(reads).shape == (2, 2, 3, 0)
    assert softmax_sum_rows(reads).shape == (2, 2, 0)
