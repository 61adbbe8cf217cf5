"""Attention to lists of keys that all heads share, against attention to everything with a mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from index_store.attention import selected_keys
from index_store.attention.attention_state import PLAIN, AttentionState, LogitForm
from index_store.attention.selected_keys import attend_selected

HEADS, GROUP, DIM = 2, 3, 8


def by_mask(
    q_HTGD: Tensor, kv_HN2D: Tensor, ids_TK: Tensor, position: int, form: LogitForm
) -> AttentionState:
    logits = form.capped(torch.einsum("htgd,hnd->htgn", q_HTGD, kv_HN2D[:, :, 0]))
    listed = torch.zeros(len(ids_TK), kv_HN2D.shape[1], dtype=torch.bool).scatter(1, ids_TK.long(), True)
    places = torch.arange(position, position + len(ids_TK))
    seen = listed & (torch.arange(kv_HN2D.shape[1]) <= places[:, None])
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    out = torch.einsum("htgn,hnd->htgd", logits.softmax(-1), kv_HN2D[:, :, 1])
    return form.add_sink(AttentionState(out, logits.logsumexp(-1)))


@pytest.mark.parametrize("cuts", [(40,), (31, 9), (0, 40), (12, 0, 28)])
@pytest.mark.parametrize(
    "form", [PLAIN, LogitForm(2.0, torch.linspace(-1, 1, HEADS * GROUP).view(HEADS, GROUP))]
)
def test_lists_give_what_a_mask_gives(
    monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], form: LogitForm
) -> None:
    """Over rows in several pieces, some at a time, with tokens in the lists that come later."""
    monkeypatch.setattr(selected_keys, "_ROW_BYTES", 5000)
    generator = torch.Generator().manual_seed(len(cuts))
    tokens, keys = 7, 40
    q_HTGD = torch.randn(HEADS, tokens, GROUP, DIM, generator=generator)
    kv_HN2D = torch.randn(HEADS, keys, 2, DIM, generator=generator)
    ids_TK = torch.stack([torch.randperm(keys, generator=generator)[:20] for _ in range(tokens)]).int()
    found = attend_selected(q_HTGD, kv_HN2D.split(cuts, dim=1), ids_TK, keys - tokens, form)
    expected = by_mask(q_HTGD, kv_HN2D, ids_TK, keys - tokens, form)
    torch.testing.assert_close(found.out, expected.out)
    torch.testing.assert_close(found.lse, expected.lse)


def test_there_is_no_list_of_no_keys() -> None:
    with pytest.raises(ValueError, match="no keys"):
        attend_selected(torch.zeros(1, 1, 1, 4), (), torch.zeros(1, 3), 0)
