"""Chunked exact attention equals the textbook formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prefill_worker.reading.causal_attention import attend_causally


def textbook(queries_HGTD: Tensor, past_HS2D: Tensor, chunk_HT2D: Tensor) -> Tensor:
    keys, values = torch.cat([past_HS2D, chunk_HT2D], dim=1).double().unbind(2)
    count, dim = queries_HGTD.shape[2:]
    logits = torch.einsum("hgtd,hsd->hgts", queries_HGTD.double(), keys) * dim**-0.5
    future = torch.ones(count, keys.shape[1], dtype=torch.bool).triu(past_HS2D.shape[1] + 1)
    return torch.einsum("hgts,hsd->hgtd", logits.masked_fill(future, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize("heads_and_group", [(1, 1), (2, 3), (4, 1)])
@pytest.mark.parametrize(("past", "count"), [(0, 1), (0, 63), (1, 1), (100, 1), (100, 63), (500, 17)])
def test_equals_the_formula(heads_and_group: tuple[int, int], past: int, count: int) -> None:
    torch.manual_seed(past + count)
    heads, group = heads_and_group
    queries = torch.randn(heads, group, count, 16) * 3
    past_kv, chunk = torch.randn(heads, past, 2, 16), torch.randn(heads, count, 2, 16)
    expected = textbook(queries, past_kv, chunk).float()
    torch.testing.assert_close(attend_causally(queries, [past_kv], chunk).out, expected, rtol=2e-5, atol=2e-6)
    pieces = [past_kv[:, : past // 3], past_kv[:, past // 3 :]]
    torch.testing.assert_close(
        attend_causally(queries, pieces, chunk, past_block=7).out, expected, rtol=2e-5, atol=2e-6
    )


def test_stored_half_precision_is_read_as_stored() -> None:
    torch.manual_seed(0)
    queries, past, chunk = torch.randn(2, 2, 9, 32), torch.randn(2, 50, 2, 32), torch.randn(2, 9, 2, 32)
    rounded = attend_causally(queries, [past.bfloat16()], chunk.bfloat16()).out
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(
        rounded, textbook(queries, past.bfloat16(), chunk.bfloat16()).float(), rtol=2e-5, atol=2e-6
    )


def test_the_future_does_not_matter() -> None:
    torch.manual_seed(0)
    queries, past, chunk = torch.randn(1, 2, 8, 16), torch.randn(1, 5, 2, 16), torch.randn(1, 8, 2, 16)
    before = attend_causally(queries, [past], chunk).out
    chunk[:, 4:] = 1e4
    after = attend_causally(queries, [past], chunk).out
    assert torch.equal(before[:, :, :4], after[:, :, :4])
    assert not torch.equal(before[:, :, 4:], after[:, :, 4:])
