"""Tails that one loop adds to attention to a context: those of the textbook, and of each session alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.listed_keys_numba import Listed, attend_listed, readable

HEADS, GROUP, COUNT = 2, 3, 40
TAILS = (1, 7, 70, 16)
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def textbook(q_HSGD: Tensor, kvs: list[Tensor]) -> AttentionState:
    """Attention of each session to its keys and values [H, n, 2, d]; 0 and -inf where there are none."""
    states = []
    for session, kv in enumerate(kvs):
        logits = torch.einsum("hgd,hnd->hgn", q_HSGD[:, session].double(), kv[:, :, 0].double())
        out = torch.einsum("hgn,hnd->hgd", logits.softmax(-1), kv[:, :, 1].double())
        states.append((out.float(), logits.logsumexp(-1).float()))
    return AttentionState(
        torch.stack([out for out, _ in states], 1), torch.stack([lse for _, lse in states], 1)
    )


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [COUNT, 0])
def test_tails_are_added_to_what_the_context_gave(head_dim: int, dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(head_dim + count)
    rows = torch.randn(HEADS, 100, 2, head_dim, generator=generator).to(dtype)
    context = rows[:, :count]
    kept = torch.randn(len(TAILS), HEADS, 90, 2, head_dim, generator=generator).to(dtype)
    tails = [each[:, :length] for each, length in zip(kept, TAILS, strict=True)]
    q = torch.randn(HEADS, len(TAILS), GROUP, head_dim, generator=generator) * head_dim**-0.5
    given = textbook(q, [context] * len(TAILS))
    before = given.out.clone(), given.lse.clone()
    found = attend_listed(context, Listed.of_tails(q, tails, given, count))
    expected = textbook(q, [torch.cat([context, tail], dim=1) for tail in tails])
    torch.testing.assert_close(found.out, expected.out, **TOLERANCE)
    torch.testing.assert_close(found.lse, expected.lse, **TOLERANCE)
    assert torch.equal(given.out, before[0])
    assert torch.equal(given.lse, before[1])
    for session, tail in enumerate(tails):
        own = AttentionState(given.out[:, session : session + 1], given.lse[:, session : session + 1])
        one = q[:, session : session + 1]
        alone = attend_listed(context, Listed.of_tails(one, [tail], own, count))
        assert torch.equal(alone.out[:, 0], found.out[:, session])
        assert torch.equal(alone.lse[:, 0], found.lse[:, session])


def test_rows_that_the_loop_cannot_read_are_left_to_others() -> None:
    context, q = torch.zeros(HEADS, 5, 2, 64), torch.zeros(HEADS, 1, GROUP, 64)
    good = torch.zeros(HEADS, 3, 2, 64)
    assert readable(q, context, [good])
    for kv, tails in (
        (context, [good, good.bfloat16()]),
        (context, [good.transpose(0, 1).contiguous().transpose(0, 1)]),
        (context.double(), [good.double()]),
    ):
        assert not readable(q, kv, tails)
