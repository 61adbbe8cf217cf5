"""Host kernels of dense tables equal their eager references, at awkward sizes."""

from __future__ import annotations

import pytest
import torch

from index_store.indexes.query_tables.search_numba import (
    TableReads,
    softmax_sum_rows,
    softmax_sum_rows_reference,
    sum_rows,
    sum_rows_reference,
)


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
