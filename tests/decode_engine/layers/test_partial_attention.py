"""Attention to keys that queries share, and to keys of each query's own."""

import pytest
import torch
from torch import Tensor

from decode_engine.layers.dense_layer import DenseLayer
from decode_engine.layers.figures import Figures
from decode_engine.layers.partial_attention import BLOCK_BYTES, attend_logits, attend_shared
from index_store.attention.attention_state import AttentionState
from index_store.attention.fused import attend_fused
from tests.decode_engine.layers.plain_attention import D, H, context, reference, tokens


@pytest.mark.parametrize("count", [1, 63, 4096, 5000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_shared_equals_full_attention(count: int, causal: bool, dtype: torch.dtype) -> None:
    kv = context(count, dtype)
    q = tokens(1, 5)[0]
    state = attend_shared(q, kv, causal=causal)
    expected = reference(q, kv[:, :0], kv[:, :, 0], kv[:, :, 1], count)
    # Without a mask the fused kernel rounds queries, weights and out to the dtype of the keys: 8 bits of bfloat16.
    rounded = not causal and dtype is torch.bfloat16
    rtol, atol = (2e-2, 1e-2) if rounded else (1e-4, 1e-5)
    torch.testing.assert_close(state.out, expected, rtol=rtol, atol=atol)
    lse = torch.einsum("htgd,hnd->htgn", q, kv[:, :, 0].float()).logsumexp(-1)
    torch.testing.assert_close(state.lse, lse, rtol=1e-5, atol=1e-2 if rounded else 1e-5)


@pytest.mark.parametrize("threads", [7, 64])
def test_attend_shared_divides_keys_among_many_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, q = context(5000), tokens(3, 5)[0]
    whole = attend_shared(q, kv, causal=False)
    monkeypatch.setattr("decode_engine.layers.partial_attention.SPLIT_KEYS", 300)
    monkeypatch.setattr(
        torch, "get_num_threads", lambda: threads
    )  # 3 parts and 2 keys over, and 16 parts of 300
    divided = attend_shared(q, kv, causal=False)
    torch.testing.assert_close(divided.out, whole.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(divided.lse, whole.lse, rtol=1e-5, atol=1e-5)


def test_dense_attention_on_a_cpu_reads_the_rows_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = context(5000, torch.bfloat16)
    read: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> AttentionState:
        read.extend((key, value))
        return attend_fused(query, key, value, causal=causal, scale=scale)

    monkeypatch.setattr("decode_engine.layers.partial_attention.attend_fused", attend)
    DenseLayer(kv, Figures()).attend(*tokens(1, 5), position=5000)
    assert [rows.data_ptr() for rows in read] == [kv.data_ptr(), kv[:, :, 1].data_ptr()]
    assert {rows.dtype for rows in read} == {torch.bfloat16}


def test_queries_that_attend_together_get_the_bits_that_they_get_alone() -> None:
    kv = context(5000, torch.bfloat16)
    q = torch.cat([tokens(1, seed)[0] for seed in range(40)], dim=1)
    together = attend_shared(q, kv, causal=False)
    for position in (0, 1, 7, 39):
        alone = attend_shared(q[:, position : position + 1], kv, causal=False)
        assert torch.equal(alone.out[:, 0], together.out[:, position])
        assert torch.equal(alone.lse[:, 0], together.lse[:, position])


def test_attend_shared_is_causal_across_block_borders() -> None:
    kv = context(BLOCK_BYTES // (H * 2 * D * 4) + 4)  # the last four keys are in a second block
    q = tokens(10, 5)[0]
    state = attend_shared(q, kv, causal=True)
    expected = reference(q, kv[:, :0], kv[:, :, 0], kv[:, :, 1], kv.shape[1] - 10)
    torch.testing.assert_close(state.out, expected, rtol=1e-4, atol=1e-5)


def test_attend_logits_ignores_keys_at_minus_infinity() -> None:
    q = tokens(2, 1)[0]
    kv = torch.randn(H, 2, 7, 2, D)
    counts = torch.tensor([[7, 3], [0, 1]])
    logits = (q @ kv[:, :, :, 0].transpose(-1, -2)).masked_fill(
        (torch.arange(7) >= counts[..., None])[:, :, None], -torch.inf
    )
    state = attend_logits(logits, kv[:, :, :, 1])
    for head in range(H):
        for position in range(2):
            rows = kv[head, position, : counts[head, position]]
            expected = (q[head, position] @ rows[:, 0].t()).softmax(-1) @ rows[:, 1]
            torch.testing.assert_close(state.out[head, position], expected, rtol=1e-4, atol=1e-4)
    assert torch.isneginf(state.lse[1, 0]).all()
