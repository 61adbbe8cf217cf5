"""Attention to listed keys where they are equals attention to gathered ones."""

from __future__ import annotations

import pytest
import torch

from index_store.attention.row_lists_numba import attend_row_lists, attend_row_lists_reference

HEADS, GROUP = 2, 3


def rows(count: int, head_dim: int, dtype: torch.dtype, slack: int = 5) -> torch.Tensor:
    """Of a buffer with room behind every head's."""
    generator = torch.Generator().manual_seed(count)
    buffer = torch.randn(HEADS, count + slack, 2, head_dim, generator=generator).to(dtype)
    buffer[:, count:] = torch.nan
    return buffer[:, :count]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 40, 96, 128])
@pytest.mark.parametrize(("context", "tail"), [(1, 0), (63, 5), (500, 100)])
@pytest.mark.parametrize("positions", [1, 4])
def test_attention_equals_that_to_gathered_rows(
    dtype: torch.dtype, head_dim: int, context: int, tail: int, positions: int
) -> None:
    generator = torch.Generator().manual_seed(context)
    queries = torch.randn(HEADS, positions, GROUP, head_dim, generator=generator)
    order = torch.rand(HEADS, positions, context + tail, generator=generator).argsort(-1)
    counts = torch.randint(0, context + tail + 1, (HEADS, positions), generator=generator)
    counts[0, 0], counts[1, 0] = 0, context + tail
    given = (rows(context, head_dim, dtype), rows(tail, head_dim, dtype), order.int(), counts.int())
    found, expected = attend_row_lists(queries, *given), attend_row_lists_reference(queries, *given)
    torch.testing.assert_close(found.out, expected.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)
    alone = attend_row_lists(queries[:, -1:, :1], *given[:2], given[2][:, -1:], given[3][:, -1:])
    assert torch.equal(alone.out, found.out[:, -1:, :1]) or head_dim % 16  # products of the reference do


def test_far_apart_logits_are_attended_to_without_overflow() -> None:
    kv = torch.zeros(1, 200, 2, 16)
    kv[0, :, 0, 0] = torch.linspace(-1000, 1000, 200)
    kv[0, :, 1, 3] = torch.arange(200.0)
    ids = torch.arange(200, dtype=torch.int32).view(1, 1, -1)
    state = attend_row_lists(torch.ones(1, 1, 1, 16), kv, kv[:, :0], ids, torch.tensor([[200]]))
    assert state.out[0, 0, 0, 3] == pytest.approx(199.0, abs=1e-3)
    assert state.lse.item() == pytest.approx(1000.0)
