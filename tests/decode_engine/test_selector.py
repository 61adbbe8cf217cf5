"""One layer of one session: what is attended, what is counted, what is appended."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode_engine.figures import Figures
from decode_engine.partial_attention import BLOCK_BYTES, attend_gathered, attend_shared
from decode_engine.selector import DenseLayer, SparseLayer
from index_store.budgets import Ratio
from index_store.indexes.base import AppendedKeys, LayerIndex, QuerySample, Ranking, Scalar
from index_store.indexes.exact import ExactIndex
from index_store.indexes.query_tables import QueryTables
from index_store.methods import METHODS, Method

H, G, D = 2, 3, 16
PARAMETERS: dict[str, Scalar] = {
    "layout": "dense",
    "subspaces": 4,
    "centroids": 8,
    "split": "strided",
    "scores": "dot",
    "alpha": 0.3,
    "iterations": 3,
}


def tokens(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [H, T, G, D] scaled, keys and values [H, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(H, count, n, D, generator=generator) for n in (G, 1, 1))
    return q * 2 / D**0.5, k[:, :, 0], v[:, :, 0]


def context(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(H, count, 2, D, generator=torch.Generator().manual_seed(count)).to(dtype)


def reference(q: Tensor, kv: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
    """Full causal attention of the queries at position.. over context and tail, in float64."""
    k = torch.cat([kv[:, :, 0].double(), keys.double()], dim=1)
    v = torch.cat([kv[:, :, 1].double(), values.double()], dim=1)
    logits = torch.einsum("htgd,hnd->htgn", q.double(), k)
    hidden = torch.arange(k.shape[1]) > position + torch.arange(q.shape[1])[:, None]
    weights = logits.masked_fill(hidden[None, :, None], -torch.inf).softmax(-1)
    return torch.einsum("htgn,hnd->htgd", weights, v).float()


def sparse_layer(kv: Tensor, method: Method, figures: Figures) -> SparseLayer:
    sample = QuerySample(tokens(60, 99)[0] * D**0.5, torch.arange(60))
    if method.name == "oracle":
        index: LayerIndex = ExactIndex(kv[:, :, 0])
    else:
        layout = "lists" if method.name == "csattention-paper" else "dense"
        index = QueryTables.build({**PARAMETERS, "layout": layout}, kv[:, :, 0], sample, 0)
    return SparseLayer(kv, index, method, figures)


@pytest.mark.parametrize("count", [1, 63, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_shared_equals_full_attention(count: int, dtype: torch.dtype) -> None:
    kv = context(count, dtype)
    q = tokens(1, 5)[0]
    state = attend_shared(q, kv, causal=False)
    expected = reference(q, kv[:, :0], kv[:, :, 0], kv[:, :, 1], count)
    torch.testing.assert_close(state.out, expected, rtol=1e-4, atol=1e-5)
    lse = torch.einsum("htgd,hnd->htgn", q, kv[:, :, 0].float()).logsumexp(-1)
    torch.testing.assert_close(state.lse, lse, rtol=1e-5, atol=1e-5)


def test_attend_shared_is_causal_across_block_borders() -> None:
    kv = context(BLOCK_BYTES // (H * 2 * D * 4) + 4)  # the last four keys are in a second block
    q = tokens(10, 5)[0]
    state = attend_shared(q, kv, causal=True)
    expected = reference(q, kv[:, :0], kv[:, :, 0], kv[:, :, 1], kv.shape[1] - 10)
    torch.testing.assert_close(state.out, expected, rtol=1e-4, atol=1e-5)


def test_attend_gathered_ignores_rows_beyond_the_count() -> None:
    q = tokens(2, 1)[0]
    kv = torch.randn(H, 2, 7, 2, D)
    counts = torch.tensor([[7, 3], [0, 1]], dtype=torch.int32)
    state = attend_gathered(q, kv, counts)
    for head in range(H):
        for position in range(2):
            rows = kv[head, position, : counts[head, position]]
            logits = q[head, position] @ rows[:, 0].t()
            expected = logits.softmax(-1) @ rows[:, 1]
            torch.testing.assert_close(state.out[head, position], expected, rtol=1e-4, atol=1e-5)
    assert torch.isneginf(state.lse[1, 0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["csattention", "csattention-paper", "oracle"])
@pytest.mark.parametrize(
    ("count", "chunks"), [(5, (3, 1, 1)), (300, (7, 1, 1)), (300, (90, 1, 80, 1, 1, 140, 1))]
)
def test_full_budget_equals_dense_attention(
    name: str, count: int, chunks: tuple[int, ...], dtype: torch.dtype
) -> None:
    if name == "csattention-paper":  # lists drop keys for good; with alpha = 1 and no backoff they hold all
        method = replace(METHODS[name], search={"group": "pooled", "weights": "projection"}, append_block=16)
    else:
        method = METHODS[name]
    kv = context(count, dtype)
    figures, dense_figures = Figures(), Figures()
    layer = sparse_layer(kv, replace(method, budget=Ratio(1.0)), figures)
    dense = DenseLayer(kv, dense_figures)
    position = count
    all_k, all_v = torch.empty(H, 0, D), torch.empty(H, 0, D)
    for number, size in enumerate(chunks):
        q, k, v = tokens(size, number)
        k, v = k.to(dtype), v.to(dtype)
        all_k, all_v = torch.cat([all_k, k], dim=1), torch.cat([all_v, v], dim=1)
        expected = reference(q, kv, all_k, all_v, position)
        torch.testing.assert_close(dense.attend(q, k, v, position), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.attend(q, k, v, position), expected, rtol=1e-4, atol=1e-4)
        position += size
    assert figures.attended == figures.available == dense_figures.available == dense_figures.attended


class Listening(LayerIndex):
    """Records the searched ranges, and ranks the oldest keys first."""

    kind = "listening"

    def __init__(self, inner: LayerIndex) -> None:
        self.inner = inner
        self.ranges: list[tuple[int, int, int]] = []

    @classmethod
    def check_options(cls, parameters: Mapping[str, Scalar], search: Mapping[str, Scalar]) -> None:
        raise AssertionError

    @classmethod
    def build(
        cls, parameters: Mapping[str, Scalar], keys_HND: Tensor, queries: QuerySample, seed: int
    ) -> Self:
        raise AssertionError

    @classmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], keys_HND: Tensor
    ) -> Self:
        raise AssertionError

    def arrays(self) -> dict[str, Tensor]:
        return self.inner.arrays()

    def start_appending(self) -> AppendedKeys:
        return self.inner.start_appending()

    def rank(
        self,
        queries_HTGD: Tensor,
        first_key: int,
        end_key: int,
        appended: AppendedKeys | None,
        search: Mapping[str, Scalar],
    ) -> Ranking:
        self.ranges.append((first_key, end_key, appended.count if appended else 0))
        return self.inner.rank(queries_HTGD, first_key, end_key, appended, search)


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 150),
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    sinks=st.integers(0, 12),
    recent=st.integers(1, 50),
    block=st.integers(1, 40),
    keep=st.floats(0.01, 1.0),
)
def test_the_parts_partition_the_keys(
    count: int, chunks: list[int], sinks: int, recent: int, block: int, keep: float
) -> None:
    """With values that name their key, the attended weight of each key shows whether it was counted once."""
    method = replace(METHODS["oracle"], budget=Ratio(keep), sinks=sinks, recent=recent, append_block=block)
    kv = context(count)
    index = Listening(ExactIndex(kv[:, :, 0]))
    figures = Figures()
    layer = SparseLayer(kv, index, method, figures)
    position = count
    for number, size in enumerate(chunks):
        q, k, v = tokens(size, number)
        # Zero queries weigh every attended key equally, so the mean of one-hot-coded values counts the keys.
        v = torch.ones_like(v)
        before = len(index.ranges)
        out = layer.attend(torch.zeros_like(q), k, v, position)
        assert torch.isfinite(out).all()
        for first, end, appended in index.ranges[before:]:
            assert first == min(sinks, count)
            assert end <= position + size - 1 - recent
            assert end <= count + appended
        position += size
    assert figures.attended <= figures.available
    assert figures.available == H * sum(range(count + 1, position + 1))


def test_no_key_counts_twice_and_none_of_the_exact_ones_is_lost() -> None:
    """Zero queries: every attended key has the same weight, so one-hot values read out who was attended."""
    count, steps = 12, 9
    kv = torch.zeros(1, count, 2, 32)
    kv[0, :, 1] = torch.eye(32)[:count]
    method = replace(METHODS["oracle"], budget=Ratio(0.1), sinks=2, recent=3, append_block=2)
    layer = SparseLayer(kv, ExactIndex(kv[:, :, 0]), method, Figures())
    for step in range(steps):
        position = count + step
        value = torch.eye(32)[position].view(1, 1, 32)
        out = layer.attend(torch.zeros(1, 1, 1, 32), torch.zeros(1, 1, 32), value, position)[0, 0, 0]
        attended = out.nonzero().flatten().tolist()
        torch.testing.assert_close(out[attended], torch.full((len(attended),), 1 / len(attended)))
        assert {0, 1} <= set(attended)
        assert set(range(position - 3, position + 1)) <= set(attended)
        assert len(attended) <= 2 + (3 + 2) + 1 + 3


def test_a_tail_key_that_left_the_window_is_still_found() -> None:
    kv = context(200)
    method = replace(METHODS["csattention"], budget=Ratio(0.02), recent=8, append_block=4)
    layer = sparse_layer(kv, method, Figures())
    target = torch.randn(H, D, generator=torch.Generator().manual_seed(4)) * 3
    for step in range(60):
        q, k, v = tokens(1, step)
        if step == 5:
            k, v = target.unsqueeze(1), torch.full_like(v, 50.0)
        layer.attend(q, k, v, 200 + step)
    query = (target / target.norm(dim=-1, keepdim=True) * 6).view(H, 1, 1, D).expand(H, 1, G, D)
    _, k, v = tokens(1, 77)
    out = layer.attend(query, k, v, 260)
    assert float(out.mean()) > 45


def test_a_period_reuses_the_selection_and_searches_again_after_it() -> None:
    kv = context(400)
    figures = Figures()
    index = Listening(ExactIndex(kv[:, :, 0]))
    layer = SparseLayer(kv, index, replace(METHODS["oracle"], period=4), figures)
    q, k, v = tokens(20, 0)
    layer.attend(q, k, v, 400)
    assert len(index.ranges) == 1
    for step in range(9):
        layer.attend(*tokens(1, step), 420 + step)
    assert len(index.ranges) == 1 + 3
    assert figures.attended < figures.available


@pytest.mark.parametrize("keep", [0.05, 0.5])
def test_long_prompts_and_large_selections_are_split(monkeypatch: pytest.MonkeyPatch, keep: float) -> None:
    kv = context(500)
    q, k, v = tokens(40, 1)
    method = replace(METHODS["csattention"], budget=Ratio(keep))
    whole = sparse_layer(kv, method, Figures()).attend(q, k, v, 500)
    monkeypatch.setattr("decode_engine.selector._SCORE_BYTES", 100_000)
    for block_bytes in (20_000, 1_000):
        monkeypatch.setattr("decode_engine.selector.BLOCK_BYTES", block_bytes)
        monkeypatch.setattr("decode_engine.partial_attention.BLOCK_BYTES", block_bytes)
        pieces = sparse_layer(kv, method, Figures()).attend(q, k, v, 500)
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)


def test_a_failed_step_can_run_again() -> None:
    kv = context(100)
    layer = sparse_layer(kv, METHODS["csattention"], Figures())
    first, second = tokens(3, 0), tokens(1, 1)
    layer.attend(*first, 100)
    once = layer.attend(*second, 103)
    assert torch.equal(layer.attend(*second, 103), once)
    assert layer.tail.length == 4
