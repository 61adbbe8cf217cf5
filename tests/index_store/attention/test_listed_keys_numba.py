"""Attention to listed keys equals its reference, session by session whatever else is attended in the same call."""

from __future__ import annotations

import pytest
import torch

from index_store.attention.attention_state import AttentionState
from index_store.attention.listed_keys_numba import (
    Listed,
    attend_listed,
    attend_listed_reference,
    leave_out,
    leave_out_reference,
)

H, G = 3, 2


def session(count: int, head_dim: int, dtype: torch.dtype, number: int) -> Listed:
    """One that has 5 to 80 keys of its own, and lists as many of those before its window as it has a number."""
    generator = torch.Generator().manual_seed(number)
    tail = torch.randn(H, 90, 2, head_dim, generator=generator).to(dtype)[:, : 5 + 25 * number]
    begin = count - 3 + 20 * number
    sinks, wanted = min(4, count), min(7 * number, max(0, begin - 4))
    order = torch.stack([torch.randperm(max(begin - sinks, 0), generator=generator) for _ in range(H)])
    ids = (order[:, :wanted].sort().values + sinks).to(torch.int32)
    counts = torch.tensor([wanted, max(0, wanted - 1), 0], dtype=torch.int32)
    queries = 3 * torch.randn(H, G, head_dim, generator=generator) * head_dim**-0.5
    others = AttentionState(
        torch.randn(H, G, head_dim, generator=generator), torch.randn(H, G, generator=generator)
    )
    return Listed(queries, tail, ids, counts, sinks, max(begin, sinks), others if number % 2 else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("count", [3, 63, 500])
def test_attention_equals_the_reference_and_depends_on_no_other_session(
    count: int, head_dim: int, dtype: torch.dtype
) -> None:
    context = torch.randn(H, count + 5, 2, head_dim, generator=torch.Generator().manual_seed(9)).to(dtype)
    context = context[:, :count]  # with room behind the rows of a head
    listed = [session(count, head_dim, dtype, number) for number in range(4)]
    together = attend_listed(context, listed)
    for own, state in zip(listed, together, strict=True):
        expected = attend_listed_reference(context, own)
        torch.testing.assert_close(state.out, expected.out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.lse, expected.lse, rtol=1e-5, atol=1e-5)
        (alone,) = attend_listed(context, [own])
        assert torch.equal(alone.out, state.out)
        assert torch.equal(alone.lse, state.lse)


@pytest.mark.parametrize("size", [1, 63, 500])
def test_listed_columns_are_left_out_where_they_count(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    whole = torch.randn(H, 2, G, size + 3, generator=generator)
    columns = torch.randint(-2, size + 2, (H, 2, 20), generator=generator, dtype=torch.int32)
    counted = torch.rand(columns.shape, generator=generator) < 0.7
    expected = whole.clone()
    leave_out_reference(expected[..., 1:-2], columns, counted)
    leave_out(whole[..., 1:-2], columns, counted)
    assert torch.equal(whole, expected)
    assert size < 10 or 0 < int(torch.isneginf(whole).sum()) < 2 * G * H * 20
