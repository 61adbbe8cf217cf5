"""Host kernels of table lists equal their eager references."""

from __future__ import annotations

import pytest
import torch

from index_store.indexes.query_tables.lists_numba import (
    Lists,
    insert_keys,
    insert_keys_reference,
    score_lists,
    score_lists_reference,
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
