"""One layer of one session: what is attended, what is counted, what is appended."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
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


ROOM = 200  # positions that one-hot values can tell apart


class Labels:
    """Values that name their key: a unit vector per position, another one in every head."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._unit_HP = torch.stack([torch.randperm(ROOM, generator=generator) for _ in range(H)])

    def values(self, first: int, count: int) -> Tensor:
        """[H, count, ROOM] for the keys first.. of every head."""
        return torch.eye(ROOM)[self._unit_HP[:, first : first + count]]

    def weights(self, out_HTGD: Tensor) -> Tensor:
        """[H, T, G, ROOM] from attention out: the weight of every key."""
        return out_HTGD.gather(-1, self._unit_HP[:, None, None].expand_as(out_HTGD))


@dataclass
class Plan:
    """What a method must search and keep, position by position."""

    method: Method
    keep: float
    sinks: int
    searched_at: int = -1

    def end(self, position: int) -> int:
        """The end of the range that a query searches unless it reuses a selection."""
        block = self.method.append_block
        return max(self.sinks, math.floor((position - self.method.recent) / block) * block)

    def step(self, position: int, searched: bool) -> tuple[int, int]:
        """(end of the range that the query's selection was chosen from, how many keys are kept)."""
        made_at = position
        if self.end(position) > self.sinks and not searched:
            made_at = self.searched_at
            assert 0 < position - made_at < self.method.period
        self.searched_at = made_at
        end = self.end(made_at)
        return end, min(end - self.sinks, math.ceil(self.keep * (end + self.method.recent)))


def random_keys(count: int, seed: int) -> Tensor:
    return torch.randn(H, count, ROOM, generator=torch.Generator().manual_seed(seed)) / ROOM**0.5


def one_hot_layer(kind: str, keys: Tensor, values: Tensor, method: Method, figures: Figures) -> SparseLayer:
    kv = torch.stack([keys, values], dim=2)
    if kind == "exact":
        return SparseLayer(kv, ExactIndex(kv[:, :, 0]), method, figures)
    sample = QuerySample(random_keys(20 * G, 5).view(H, 20, G, ROOM), torch.arange(20))
    return SparseLayer(kv, QueryTables.build(PARAMETERS, kv[:, :, 0], sample, 0), method, figures)


def check_are_the_best(weights_HGP: Tensor, q_HGD: Tensor, keys_HND: Tensor, sinks: int, end: int) -> None:
    """Of the keys sinks..end-1 none that was left out has a larger weight, summed over the group, than one kept."""
    logits = torch.einsum("hgd,hnd->hgn", q_HGD.double(), keys_HND[:, sinks:end].double())
    scores_HM = logits.softmax(-1).sum(1) * (end - sinks)
    kept_HM = weights_HGP[:, 0, sinks:end] > 0
    lowest_kept = scores_HM.masked_fill(~kept_HM, torch.inf).amin(1)
    highest_left_out = scores_HM.masked_fill(kept_HM, -torch.inf).amax(1)
    assert (lowest_kept >= highest_left_out - 1e-6).all()


def that_fit(sizes: list[int]) -> list[int]:
    """Those that end within the half of the positions that is not the context's."""
    return [size for size, end in zip(sizes, accumulate(sizes), strict=True) if end <= ROOM // 2]


@pytest.mark.parametrize("kind", ["exact", "dense tables"])
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, ROOM // 2),
    chunks=st.lists(st.just(1) | st.integers(1, 40), min_size=1, max_size=14).map(that_fit),
    sinks=st.integers(0, 12),
    recent=st.integers(1, 50),
    block=st.integers(1, 40),
    keep=st.floats(0.01, 1.0),
    period=st.integers(1, 4),
)
def test_the_parts_partition_the_keys(
    kind: str, count: int, chunks: list[int], sinks: int, recent: int, block: int, keep: float, period: int
) -> None:
    """Queries near zero weigh every attended key alike but still rank; values name their key.

    So attention out says which keys were attended, and that each of them counted once.
    """
    name = "oracle" if kind == "exact" else "csattention"
    method = replace(
        METHODS[name], budget=Ratio(keep), sinks=sinks, recent=recent, append_block=block, period=period
    )
    labels, figures = Labels(), Figures()
    keys = random_keys(count, 0)
    layer = one_hot_layer(kind, keys, labels.values(0, count), method, figures)
    plan = Plan(method, keep, min(sinks, count))
    position, kept, attended, available = count, 0, 0, 0
    for number, size in enumerate(chunks):
        q = random_keys(size * G, 200 + number).view(H, size, G, ROOM) / 20
        new = random_keys(size, 100 + number)
        keys = torch.cat([keys, new], dim=1)
        before = figures.searches
        weights = labels.weights(layer.attend(q, new, labels.values(position, size), position))
        searched = size > 1 or figures.searches > before
        for step in range(size):
            now = position + step
            end, chosen = plan.step(now, searched)
            seen = weights[:, step] > 0
            assert seen[:, :, : plan.sinks].all()
            assert seen[:, :, max(0, now - recent) : now + 1].all()
            assert seen[:, :, end : now + 1].all()
            assert not seen[:, :, now + 1 :].any()
            assert (seen == seen[:, :1]).all()
            total = plan.sinks + chosen + now + 1 - end
            assert (seen.sum(-1) == total).all()
            alike = torch.full((H * G * total,), 1 / total)
            torch.testing.assert_close(weights[:, step][seen], alike, rtol=0.05, atol=0)
            if kind == "exact" and end > plan.sinks and searched:
                check_are_the_best(weights[:, step], q[:, step], keys, plan.sinks, end)
            kept, attended, available = kept + chosen, attended + total, available + now + 1
        position += size
    assert figures.kept == H * kept
    assert figures.attended == figures.sparse_attended == H * attended
    assert figures.available == figures.sparse_available == H * available


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
        monkeypatch.setattr("decode_engine.selector._GATHER_BYTES", block_bytes)
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
