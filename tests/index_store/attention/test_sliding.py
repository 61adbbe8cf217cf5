"""Attention through a sliding window, in runs of fused kernels and with masks, equals the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState, LogitForm
from index_store.attention.fused import attend_masked, attend_recent, attend_window


def formula(
    queries_HGTD: Tensor,
    kv_HS2D: Tensor,
    first: int,
    window: int | None,
    cap: float | None,
    dropped: int | None = None,
) -> AttentionState:
    """dropped: in chunks, and so many keys are not there any more that came before."""
    keys, values = kv_HS2D.double().unbind(2)
    logits = torch.einsum("hgtd,hsd->hgts", queries_HGTD.double(), keys) * keys.shape[-1] ** -0.5
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    count, many = queries_HGTD.shape[2], kv_HS2D.shape[1]
    ages = first + torch.arange(count)[:, None] - torch.arange(many)
    unseen = ages < 0
    if window is not None and dropped is not None:
        places = dropped + torch.arange(many)
        unseen |= (dropped + first + torch.arange(count))[:, None] // window != places // window
    elif window is not None:
        unseen |= ages >= window
    logits.masked_fill_(unseen, -torch.inf)
    weights = logits.softmax(-1).nan_to_num(0.0)
    return AttentionState(
        torch.einsum("hgts,hsd->hgtd", weights, values).float(), logits.logsumexp(-1).float()
    )


def assert_same(found: AttentionState, expected: AttentionState) -> None:
    torch.testing.assert_close(found.out, expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "before", "window"),
    [
        (1, 0, 4),
        (1, 10, 4),
        (7, 0, 4),
        (7, 2, 4),
        (7, 3, 4),
        (7, 9, 4),
        (20, 0, 64),
        (63, 70, 16),
        (10, 5, 1),
        (9, 1, 2),
    ],
)
def test_a_window_equals_the_formula(tokens: int, before: int, window: int) -> None:
    generator = torch.Generator().manual_seed(tokens + before)
    queries = torch.randn(2, 3, tokens, 16, generator=generator)
    kv = torch.randn(2, before + tokens, 2, 16, generator=generator)
    expected = formula(queries, kv, before, window, None)
    assert_same(attend_window(queries, kv, window), expected)
    assert_same(attend_masked(queries, kv, before, window), expected)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cap", [None, 0.7])
def test_masks_and_caps_equal_the_formula(
    window: int | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some queries see no key, and where keys come in several blocks."""
    monkeypatch.setattr("index_store.attention.fused._LOGIT_BYTES", 4 * 2 * 3 * 30 * 7)
    generator = torch.Generator().manual_seed(3)
    queries, kv = (torch.randn(shape, generator=generator) for shape in ((2, 3, 30, 16), (2, 25, 2, 16)))
    for first in (-4, 0, 24):
        found = attend_masked(queries, kv, first, window, cap)
        assert_same(found, formula(queries, kv, first, window, cap))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("dropped", [0, 3, 4, 13])
@pytest.mark.parametrize(("tokens", "before"), [(1, 4), (1, 7), (9, 4), (23, 7), (23, 0)])
def test_chunks_equal_the_formula(tokens: int, before: int, dropped: int, cap: float | None) -> None:
    """Wherever in a chunk the queries begin and end, and whatever is there of those before."""
    before = (
        before if dropped + before > 8 else 8 - dropped + before
    )  # a whole chunk at least, or all there is
    torch.manual_seed(tokens)
    queries, rows = torch.randn(2, 3, tokens, 16), torch.randn(2, before + tokens, 2, 16)
    found = attend_recent(queries, rows, 8, dropped + before, chunked=True, cap=cap)
    assert_same(found, formula(queries, rows, before, 8, cap, dropped))


def test_a_sink_is_one_more_logit_without_a_value() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 4, 3, 9, generator=generator)
    values, sinks = torch.randn(2, 9, 8, generator=generator), torch.randn(2, 3, generator=generator)
    state = AttentionState(torch.einsum("htgs,hsd->htgd", logits.softmax(-1), values), logits.logsumexp(-1))
    found = LogitForm(sink_HG=sinks).add_sink(state)
    joined = torch.cat([logits, sinks[:, None, :, None].expand(-1, 4, -1, -1)], dim=-1)
    expected = torch.einsum("htgs,hsd->htgd", joined.softmax(-1)[..., :-1], values)
    torch.testing.assert_close(found.out, expected)
    torch.testing.assert_close(found.lse, joined.logsumexp(-1))
