"""Merging partial attention results."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from index_store.attention.attention_state import AttentionState


def attend(logits: torch.Tensor, values: torch.Tensor) -> AttentionState:
    return AttentionState(logits.softmax(-1) @ values, logits.logsumexp(-1))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    cuts=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    scale=st.floats(0.1, 30),
)
def test_merge_of_any_split_in_any_grouping_is_full_attention(
    seed: int, cuts: tuple[int, int], scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 2, 30, generator=generator) * scale
    values = torch.randn(3, 30, 5, generator=generator)
    low, high = sorted(cuts)
    parts = [
        attend(logits[..., a:b], values[:, a:b]) if b > a else AttentionState.empty((3, 2), 5)
        for a, b in ((0, low), (low, high), (high, 30))
    ]
    whole = attend(logits, values)
    for merged in (
        parts[0].merge(parts[1]).merge(parts[2]),
        parts[0].merge(parts[1].merge(parts[2])),
        parts[2].merge(parts[0]).merge(parts[1]),
    ):
        torch.testing.assert_close(merged.out, whole.out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(merged.lse, whole.lse, rtol=1e-5, atol=1e-5)


def test_merge_of_empty_states_is_empty() -> None:
    empty = AttentionState.empty((2,), 4).merge(AttentionState.empty((2,), 4))
    assert torch.isneginf(empty.lse).all()
    assert torch.equal(empty.out, torch.zeros(2, 4))
