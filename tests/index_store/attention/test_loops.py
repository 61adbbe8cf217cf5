"""Compiled loops of attention equal plain attention: listed keys, tails, and weights pooled over a group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.listed_keys_numba import (
    Listed,
    attend_context,
    attend_context_reference,
    attend_listed,
    attend_listed_reference,
    readable,
)
from index_store.attention.rows_in_line_numba import pooled_weights, pooled_weights_reference
from tests.support.devices import crossed

H, G = 3, 2


SESSIONS = 4


def sessions(count: int, head_dim: int, dtype: torch.dtype) -> Listed:
    """They have 5 to 80 keys of their own, and list seven more of those before their window than the one before."""
    numbers = range(SESSIONS)
    generator = torch.Generator().manual_seed(count)
    sinks = min(4, count)
    begins = [max(count - 3 + 20 * number, sinks) for number in numbers]
    wanted = [min(7 * number, begins[number] - sinks) for number in numbers]
    ids = torch.full((H, SESSIONS, max(wanted) + 2), 99_999, dtype=torch.int32)  # which no row counts
    counts = torch.zeros(H, SESSIONS, dtype=torch.int32)
    for number in numbers:
        for head in range(H):
            order = torch.randperm(begins[number] - sinks, generator=generator)[: wanted[number]]
            ids[head, number, : wanted[number]] = order.sort().values + sinks
        counts[:, number] = torch.tensor([wanted[number], max(0, wanted[number] - 1), 0])
    shape = (H, SESSIONS, G)
    others = AttentionState(
        torch.randn(*shape, head_dim, generator=generator), torch.randn(shape, generator=generator)
    )
    others.lse[:, ::2] = -torch.inf
    others.out[:, ::2] = 0
    tails = [
        torch.randn(H, 90, 2, head_dim, generator=generator).to(dtype)[:, : 5 + 25 * number]
        for number in numbers
    ]
    queries = 3 * head_dim**-0.5 * torch.randn(*shape, head_dim, generator=generator)
    return Listed(queries, tails, ids, counts, [sinks] * SESSIONS, begins, others)


@crossed(
    {
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
        "head_dim": [40, 64],
        "count": [3, 63, 500],
    }
)
def test_attention_equals_the_reference_and_depends_on_no_other_session(
    count: int, head_dim: int, dtype: torch.dtype
) -> None:
    context = torch.randn(H, count + 5, 2, head_dim, generator=torch.Generator().manual_seed(9)).to(dtype)
    context = context[:, :count]  # with room behind the rows of a head
    listed = sessions(count, head_dim, dtype)
    before = listed.others.out.clone()
    together, expected = attend_listed(context, listed), attend_listed_reference(context, listed)
    torch.testing.assert_close(together.out, expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.lse, expected.lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(listed.others.out, before)
    for number in range(SESSIONS):
        alone = attend_listed(context, listed.of(number))
        assert torch.equal(alone.out[:, 0], together.out[:, number])
        assert torch.equal(alone.lse[:, 0], together.lse[:, number])


def rows(count: int, head_dim: int, dtype: torch.dtype, slack: int = 5) -> torch.Tensor:
    """Of a buffer with room behind every head's."""
    generator = torch.Generator().manual_seed(count)
    buffer = torch.randn(H, count + slack, 2, head_dim, generator=generator).to(dtype)
    buffer[:, count:] = torch.nan
    return buffer[:, :count]


@crossed(
    {
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
        "head_dim": [16, 40, 96, 128],
        "context, tail": [(1, 0), (63, 5), (500, 100)],
        "positions": [1, 4],
    }
)
def test_attention_of_positions_equals_that_to_gathered_rows(
    dtype: torch.dtype, head_dim: int, context: int, tail: int, positions: int
) -> None:
    generator = torch.Generator().manual_seed(context)
    queries = torch.randn(H, positions, G, head_dim, generator=generator)
    order = torch.rand(H, positions, context + tail, generator=generator).argsort(-1)
    counts = torch.randint(0, context + tail + 1, (H, positions), generator=generator)
    counts[0, 0], counts[1, 0] = 0, context + tail
    kv, own, end = rows(context, head_dim, dtype), rows(tail, head_dim, dtype), context + tail
    listed = Listed.of_positions(queries, own, end, order.int(), counts.int())
    found, expected = attend_listed(kv, listed), attend_listed_reference(kv, listed)
    torch.testing.assert_close(found.out, expected.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)
    last = Listed.of_positions(queries[:, -1:, :1], own, end, order[:, -1:], counts[:, -1:])
    alone = attend_listed(kv, last)
    assert torch.equal(alone.out, found.out[:, -1:, :1])


@pytest.mark.parametrize(("threads", "count"), [(1, 2100), (2, 5000), (8, 5000), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_context_is_read_for_all_sessions_at_once(
    threads: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("index_store.attention.listed_keys_numba.thread_count", lambda: threads)
    kv = rows(count, 40, dtype)
    queries = 3 * 40**-0.5 * torch.randn(H, 7, G, 40, generator=torch.Generator().manual_seed(1))
    found, expected = attend_context(kv, queries), attend_context_reference(kv, queries)
    torch.testing.assert_close(found.out, expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)
    for number in (0, 3, 6):
        alone = attend_context(kv, queries[:, number : number + 1])
        assert torch.equal(alone.out[:, 0], found.out[:, number])
        assert torch.equal(alone.lse[:, 0], found.lse[:, number])


def test_far_apart_logits_are_attended_to_without_overflow() -> None:
    kv = torch.zeros(1, 200, 2, 16)
    kv[0, :, 0, 0] = torch.linspace(-1000, 1000, 200)
    kv[0, :, 1, 3] = torch.arange(200.0)
    ids = torch.arange(200, dtype=torch.int32).view(1, 1, -1)
    counts = torch.tensor([[200]])
    state = attend_listed(kv, Listed.of_positions(torch.ones(1, 1, 1, 16), kv[:, :0], 200, ids, counts))
    assert state.out[0, 0, 0, 3] == pytest.approx(199.0, abs=1e-3)
    assert state.lse.item() == pytest.approx(1000.0)


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


@crossed(
    {
        "head_dim": [32, 64, 128],
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
        "count": [COUNT, 0],
    }
)
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
        alone = attend_listed(context, Listed.of_tails(q[:, session : session + 1], [tail], own, count))
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


@pytest.mark.parametrize("count", [1, 63, 1024, 20_000])
@pytest.mark.parametrize(("positions", "group"), [(1, 2), (3, 4)])
def test_it_equals_the_reference(count: int, positions: int, group: int) -> None:
    """Also of logits that are missing, of heads without any, and of weights too small for a float."""
    generator = torch.Generator().manual_seed(count)
    logits = 30 * torch.randn(2, positions, group, count, generator=generator)
    logits[:, :, 0, ::3] = -torch.inf
    logits[:, :, :, ::6] = -torch.inf
    logits[1, 0, 1] = -torch.inf
    logits[:, :, :, 1::6] -= 500
    found, expected = pooled_weights(logits), pooled_weights_reference(logits)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-30)
    assert torch.equal(found.isneginf(), torch.isneginf(logits).all(2))


def test_no_keys_have_no_weights() -> None:
    assert pooled_weights(torch.empty(2, 1, 3, 0)).shape == (2, 1, 0)
