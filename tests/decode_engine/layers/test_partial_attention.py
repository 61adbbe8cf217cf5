"""Attention over a part of the keys, also over rows in two planes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from decode_engine.layers.dense_layer import DenseLayer
from decode_engine.layers.figures import Figures
from decode_engine.layers.partial_attention import (
    BLOCK_BYTES,
    attend_logits,
    attend_shared,
    copy_rows,
    pick_rows,
    stream_blocks,
)
from decode_engine.layers.sparse_layer import LayerSearch, SparseLayer, attend_sparse_together
from index_store.attention.attention_state import AttentionState, LogitForm
from index_store.attention.fused import attend_fused
from index_store.indexes.coarse_rows.two_planes import TwoPlanes
from index_store.indexes.exact_index import ExactIndex
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from tests.decode_engine.layers.plain_attention import D, H, context, reference, tokens
from tests.index_store.indexes.coarse_rows.test_coarse_rows import planes_of
from tests.support.layers import ALL_METHODS, build_search, with_budget, with_everything


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
    DenseLayer(kv, Figures()).attend(*tokens(3, 5), position=5000)
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


HEADS, GROUP, CONTEXT, DIM = 2, 3, 300, 32


def make_context() -> tuple[TwoPlanes, Tensor]:
    """Rows in two planes, and decoded."""
    kv = torch.randn(HEADS, CONTEXT, 2, DIM, generator=torch.Generator().manual_seed(5)).bfloat16()
    planes = planes_of(kv)
    return planes, planes.decode(0, CONTEXT)


def make_step(seed: int, positions: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS, positions, GROUP, DIM, generator=generator) * DIM**-0.5 * 3
    keys, values = torch.randn(2, HEADS, positions, DIM, generator=generator).bfloat16().float()
    return q, keys, values


def search_over(method: Method, planes: TwoPlanes, decoded: Tensor) -> LayerSearch:
    search = build_search(method, decoded, GROUP)
    index = ExactIndex(planes) if isinstance(search.index, ExactIndex) else search.index
    partition = ExactIndex(planes) if isinstance(search.partition, ExactIndex) else search.partition
    return LayerSearch(index, partition, search.thresholds)


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(cap=5.0)])
@pytest.mark.parametrize("positions", [1, 20])
def test_full_attention_is_that_over_decoded_rows(
    form: LogitForm, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_engine.layers.partial_attention.DECODED_BYTES", 64 * 2 * HEADS * 2 * DIM)
    planes, decoded = make_context()
    step = make_step(1, positions)
    found = DenseLayer(planes, Figures(), form=form).attend(*step, CONTEXT)
    expected = DenseLayer(decoded, Figures(), form=form).attend(*step, CONTEXT)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert DenseLayer(planes, Figures()).tail.rows.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ALL_METHODS)
def test_a_full_budget_is_full_attention_to_decoded_rows(name: str) -> None:
    planes, decoded = make_context()
    method = with_everything(ALL_METHODS[name])
    layer = SparseLayer(planes, search_over(method, planes, decoded), method, Figures())
    dense = DenseLayer(decoded, Figures())
    for position in range(CONTEXT, CONTEXT + 3):
        step = make_step(position)
        found, expected = layer.attend(*step, position), dense.attend(*step, position)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["refined", "csattention", "oracle", "oracle+centred", "tactic"])
def test_a_selection_is_attended_to_as_over_decoded_rows(name: str) -> None:
    planes, decoded = make_context()
    method = with_budget(get_method(name), 0.1)
    search = search_over(method, planes, decoded)
    over_planes = SparseLayer(planes, search, method, Figures())
    plain = SparseLayer(decoded, search, method, Figures())
    assert (over_planes.sharing is not None) == (name == "refined")
    # The last steps search a part of the tail, too.
    for position, positions in ((CONTEXT, 12), (CONTEXT + 12, 1), (CONTEXT + 13, 190), (CONTEXT + 203, 1)):
        step = make_step(position, positions)
        found, expected = over_planes.attend(*step, position), plain.attend(*step, position)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_steps_taken_together_have_the_bits_of_steps_alone() -> None:
    planes, decoded = make_context()
    method = with_budget(get_method("refined"), 0.1)
    search = search_over(method, planes, decoded)

    def layer_behind(tail: int) -> SparseLayer:
        layer = SparseLayer(planes, search, method, Figures())
        layer.attend(*make_step(tail, tail), CONTEXT)
        return layer

    tails = (3, 150, 40)
    calls = [(layer_behind(tail), *make_step(tail + 1), CONTEXT + tail) for tail in tails]
    together = attend_sparse_together(calls)
    for tail, found in zip(tails, together, strict=True):
        assert torch.equal(found, layer_behind(tail).attend(*make_step(tail + 1), CONTEXT + tail))


def test_rows_are_read_as_they_are_decoded() -> None:
    planes, decoded = make_context()
    cpu = torch.device("cpu")
    assert torch.equal(torch.cat(list(stream_blocks(planes, cpu)), dim=1), decoded)
    assert torch.equal(copy_rows(planes, 7, 90, cpu), decoded[:, 7:90])
    assert copy_rows(planes, 9, 3, cpu).shape == (HEADS, 0, 2, DIM)
    ids = torch.randint(0, CONTEXT, (HEADS, 2, 5), dtype=torch.int32)
    wanted = decoded[torch.arange(HEADS)[:, None, None], ids.long()]
    assert torch.equal(pick_rows(planes, ids).view(wanted.shape), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("low_on_host", [False, True])
@pytest.mark.parametrize("name", ["full", "refined"])
def test_a_device_attends_to_the_same_rows(name: str, low_on_host: bool) -> None:
    planes, decoded = make_context()
    tensors = {
        field.name: getattr(planes.coarse, field.name).cuda()
        for field in fields(planes.coarse)
        if isinstance(getattr(planes.coarse, field.name), Tensor)
    }
    coarse = replace(planes.coarse, **tensors)
    low = planes.low_HN2C if low_on_host else planes.low_HN2C.cuda()
    beside = torch.device("cuda", 0) if low_on_host else None
    there = TwoPlanes(coarse, low, planes.dtype)
    method = get_method(name)
    for positions in (1, 12):
        step = make_step(7, positions)
        on_device = tuple(tensor.cuda() for tensor in step)
        if name == "full":
            found = DenseLayer(there, Figures(), beside).attend(*on_device, CONTEXT)
            expected = DenseLayer(decoded, Figures()).attend(*step, CONTEXT)
        else:  # hosts round scores otherwise, and may list another key at the border
            search = build_search(method, decoded.cuda(), GROUP)
            found = SparseLayer(there, search, method, Figures(), beside).attend(*on_device, CONTEXT)
            expected = SparseLayer(decoded.cuda(), search, method, Figures()).attend(*on_device, CONTEXT)
        torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-2, atol=1e-2)
