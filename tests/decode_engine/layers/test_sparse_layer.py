"""Searching layers, when they search, their tails, and that all ways through them are one, alone and together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode_engine.layers import sparse_layer
from decode_engine.layers.dense_layer import DenseLayer, Tail
from decode_engine.layers.figures import Figures
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.sparse_layer import LayerSearch, SparseLayer, attend_sparse_together
from index_store.attention.attention_state import PLAIN, AttentionState, LogitForm
from index_store.indexes.interface.layer_index import Asked
from index_store.methods.method import Method
from index_store.methods.presets import METHODS, get_method
from index_store.selection.budgets import Budget, Mass, Ratio, Threshold, TokenCount
from index_store.selection.remainder_states import ExactKeys, remainder_state
from tests.decode_engine.layers.plain_attention import D, G, H, context, reference, tokens
from tests.support.devices import crossed
from tests.support.layers import (
    ALL_METHODS,
    build_index,
    build_layer,
    build_search,
    with_budget,
    with_everything,
)


def test_a_tail_tells_kernels_where_its_rows_are() -> None:
    tail = Tail(2, 4, torch.float16)
    keys, values = torch.randn(2, 2, 3, 4)
    tail.write(0, keys, values)
    assert torch.equal(tail.rows, torch.stack((keys, values), dim=2).half())
    assert tail.address == tail.rows.data_ptr()
    assert tail.head_bytes == tail.capacity * 2 * 4 * 2


@crossed(
    {
        "dtype": [torch.float32, torch.bfloat16],
        "name": ALL_METHODS,
        "count, chunks": [(5, (3, 1, 1)), (300, (7, 1, 1)), (300, (90, 1, 80, 1, 1, 140, 1))],
    }
)
def test_full_budget_equals_dense_attention(
    name: str, count: int, chunks: tuple[int, ...], dtype: torch.dtype
) -> None:
    method = with_everything(ALL_METHODS[name])
    kv = context(count, dtype)
    figures, dense_figures = Figures(), Figures()
    layer = build_layer(replace(method, append_block=max(16, method.append_block)), kv, G, figures)
    dense = DenseLayer(kv, dense_figures)
    position = count
    all_k, all_v = torch.empty(H, 0, D), torch.empty(H, 0, D)
    for number, size in enumerate(chunks):
        q, k, v = tokens(size, number)
        k, v = k.to(dtype), v.to(dtype)
        all_k, all_v = torch.cat([all_k, k], dim=1), torch.cat([all_v, v], dim=1)
        expected = reference(q, kv, all_k, all_v, position)
        # Over a context in bfloat16 full attention is the fused kernel's, which rounds.
        close = 1e-4 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(dense.attend(q, k, v, position), expected, rtol=close, atol=close)
        torch.testing.assert_close(layer.attend(q, k, v, position), expected, rtol=1e-4, atol=1e-4)
        position += size
    assert figures.attended == figures.available == dense_figures.available == dense_figures.attended


ROOM = 96  # positions that one-hot values can tell apart


class Labels:
    """Values that name their key: a unit vector per position, another one in every head.

    The least and the largest channel of a value are coded exactly, but for the rounding of its scale.
    """

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
    """What a method must search, position by position."""

    method: Method
    sinks: int
    searched_at: int = -1

    def end(self, position: int) -> int:
        """The end of the range that a query searches unless it uses an earlier selection."""
        block = self.method.append_block
        return max(self.sinks, math.floor((position - self.method.recent) / block) * block)

    def step(self, position: int, size: int) -> int:
        """The end of the range that the query's selection was chosen from; `size` tokens are fed with it."""
        made_at = position
        if self.end(position) == self.sinks:
            return self.sinks
        if size == 1:
            age = position - self.searched_at
            if self.searched_at >= 0 and 0 < age < self.method.period:
                made_at = self.searched_at
            self.searched_at = made_at
        return self.end(made_at)

    def kept(self, position: int, end: int) -> int | None:
        """How many keys are kept, where the method's budget says that beforehand."""
        budget: Budget | None = self.method.budget
        if not isinstance(budget, Ratio) or self.method.name == "csattention-paper":
            return None
        searched = end - self.sinks
        return min(searched, math.ceil(budget.keep * (end + self.method.recent)))


def random_keys(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(H, count, ROOM, generator=generator).div(ROOM**0.5)


def that_fit(sizes: list[int]) -> list[int]:
    """Those that end within the half of the positions that is not the context's."""
    return [size for size, end in zip(sizes, accumulate(sizes), strict=True) if end <= ROOM // 2]


@pytest.mark.parametrize("name", ALL_METHODS)
@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(1, ROOM // 2),
    chunks=st.lists(st.just(1) | st.integers(1, 20), min_size=1, max_size=8).map(that_fit),
    more_sinks=st.integers(0, 4),
    recent=st.integers(1, 30),
    block=st.integers(1, 20),
    keep=st.floats(0.01, 1.0),
    period=st.sampled_from([1, 3]),
    repeated=st.booleans(),
)
def test_the_parts_partition_the_keys(
    name: str,
    count: int,
    chunks: list[int],
    more_sinks: int,
    recent: int,
    block: int,
    keep: float,
    period: int,
    repeated: bool,
) -> None:
    """Queries near zero weigh all keys alike, approximated ones too, but still rank; values name their key.

    So attention out says which keys were attended, and that each of them counted once. With a remainder all keys are.
    """
    listed = ALL_METHODS[name]
    method = replace(
        with_budget(listed, keep),
        sinks=listed.sinks + more_sinks,
        recent=recent,
        append_block=block,
        period=period,
    )
    labels, figures = Labels(), Figures()
    layer = build_layer(
        method, torch.stack([random_keys(count, 0), labels.values(0, count)], dim=2), G, figures
    )
    plan = Plan(method, min(method.sinks, count))
    position, attended, available = count, 0, 0
    for number, size in enumerate(chunks):
        q = random_keys(size * G, 200 + number).view(H, size, G, ROOM) / 2000
        step = (q, random_keys(size, 100 + number), labels.values(position, size), position)
        if repeated:
            before = replace(figures)
            layer.attend(*step)
            for field in ("attended", "available", "sparse_attended", "sparse_available", "kept"):
                setattr(figures, field, getattr(before, field))
        weights = labels.weights(layer.attend(*step))
        for row in range(size):
            now = position + row
            end = plan.step(now, size)
            seen = weights[:, row] > 1e-5
            assert not seen[:, :, now + 1 :].any()
            assert seen[:, :, : plan.sinks].all()
            assert seen[:, :, max(0, now - recent) : now + 1].all()
            assert seen[:, :, end : now + 1].all()
            assert (seen == seen[:, :1]).all()
            if not method.drops_remainder:
                assert seen[:, :, : now + 1].all()
            totals = seen.sum(-1)
            kept = plan.kept(now, end)
            if method.drops_remainder and kept is not None:
                assert (totals == plan.sinks + kept + now + 1 - end).all()
            alike = (1 / totals)[..., None].expand(seen.shape)[seen]
            # Weights of a coarse copy are multiples of a 127th on a CPU, so off by half of one, and so is their sum.
            tolerance = 8e-3 if method.remainder.name == "coarse" else 2e-3
            torch.testing.assert_close(weights[:, row][seen], alike, rtol=tolerance, atol=0)
            attended += int(totals[:, 0].sum())
            available += now + 1
        position += size
    assert figures.available == figures.sparse_available == H * available
    assert figures.attended == figures.sparse_attended
    assert figures.attended == attended if method.drops_remainder else figures.attended <= attended


@pytest.mark.parametrize("name", ["csattention+dropped", "csattention", "multipole", "squeezed"])
def test_a_tail_key_that_left_the_window_is_still_found(name: str) -> None:
    kv = context(200)
    method = replace(with_budget(get_method(name), 0.05), recent=8, append_block=4)
    layer = build_layer(method, kv, G)
    target = torch.randn(H, D, generator=torch.Generator().manual_seed(4)) * 3
    for step in range(60):
        q, k, v = tokens(1, step)
        if step == 5:
            k, v = target.unsqueeze(1), torch.full_like(v, 50.0)
        layer.attend(q, k, v, 200 + step)
    query = (target / target.norm(dim=-1, keepdim=True) * 6).view(H, 1, 1, D).expand(H, 1, G, D)
    _, k, v = tokens(1, 77)
    seen: list[Observation] = []
    layer.observer = seen.append
    out = layer.attend(query, k, v, 260)
    assert (seen[0].selection.ids_HTK == 205).any(-1).all()
    assert float(out.mean()) > 45


@pytest.mark.parametrize("name", ["csattention", "csattention+dropped", "multipole-tree", "quest"])
@pytest.mark.parametrize("keep", [0.05, 0.5])
def test_long_prompts_and_large_selections_are_split(
    monkeypatch: pytest.MonkeyPatch, name: str, keep: float
) -> None:
    kv = context(500)
    q, k, v = tokens(40, 1)
    method = replace(get_method(name), budget=Ratio(keep))
    whole = build_layer(method, kv, G).attend(q, k, v, 500)
    monkeypatch.setattr("decode_engine.layers.sparse_layer._SCORE_BYTES", 100_000)
    for block_bytes in (20_000, 1_000):
        monkeypatch.setattr("decode_engine.layers.selected_attention.GATHER_BYTES", block_bytes)
        monkeypatch.setattr("decode_engine.layers.partial_attention.BLOCK_BYTES", block_bytes)
        pieces = build_layer(method, kv, G).attend(q, k, v, 500)
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["csattention", "tactic", "multipole"])
def test_a_failed_step_can_run_again(name: str) -> None:
    kv = context(100)
    layer = build_layer(METHODS[name], kv, G)
    first, second = tokens(3, 0), tokens(1, 1)
    layer.attend(*first, 100)
    once = layer.attend(*second, 103)
    assert torch.equal(layer.attend(*second, 103), once)
    assert layer.tail.count == 4


@pytest.mark.parametrize("name", ["csattention", "multipole", "csattention-paper"])
def test_other_chunks_after_a_failure_leave_no_trace_of_it(name: str) -> None:
    """The failed chunk had appended keys beyond the range that the next ones search, and other ones than come then."""
    kv = context(120)
    method = replace(METHODS[name], budget=Ratio(0.1), recent=8, append_block=4)
    failed, fresh = build_layer(method, kv, G), build_layer(method, kv, G)
    failed.attend(*tokens(60, 1), 120)
    q, k, v = tokens(60, 0)
    for first in range(0, 60, 20):
        step = (q[:, first : first + 20], k[:, first : first + 20], v[:, first : first + 20], 120 + first)
        assert torch.equal(failed.attend(*step), fresh.attend(*step))
    assert failed.nbytes == fresh.nbytes


COUNT, RECENT, BLOCK = 300, 20, 16
"""Short prompts and few steps: all that is searched is in the context."""


Make = Callable[[], SparseLayer]


def step(make: Make) -> None:
    make().attend(*tokens(1, 1), COUNT)


def steps_together(make: Make) -> None:
    layers = [make() for _ in range(3)]
    if layers[0].sharing is not None:
        attend_sparse_together([(layer, *tokens(1, seed), COUNT) for seed, layer in enumerate(layers)])
    else:
        for layer in layers:
            layer.attend(*tokens(1, 4), COUNT)


def prompt(make: Make) -> None:
    make().attend(*tokens(9, 2), COUNT)


def shared_prompt(make: Make) -> None:
    make().attend(*tokens(9, 2), COUNT, shared=True)


def expected(seen: Observation, search: LayerSearch, method: Method) -> Tensor:
    """Attention out [H, T, G, D] of what was observed."""
    rows = torch.cat([seen.rows.context_HN2D, seen.rows.tail_Ht2D], dim=1).float()
    selection = seen.selection
    outs = []
    for t in range(seen.q_HTGD.shape[1]):
        position, q = seen.position + t, seen.q_HTGD[:, t : t + 1]
        own = t if selection.ids_HTK.shape[1] > 1 else 0
        attended = torch.zeros(H, position + 1, dtype=torch.bool)
        attended[:, : seen.sinks] = attended[:, seen.search_end :] = True
        for head in range(H):
            kept = selection.ids_HTK[head, own, : int(selection.counts_HT[head, own])]
            assert ((kept >= seen.sinks) & (kept < seen.search_end)).all()
            attended[head, kept.long()] = True
        keys, values = rows[:, : position + 1, 0], rows[:, : position + 1, 1]
        logits = seen.form.capped(torch.einsum("htgd,hnd->htgn", q, keys))
        seen_logits = logits.masked_fill(~attended[:, None, None], -torch.inf)
        state = AttentionState(seen_logits.softmax(-1) @ values[:, None], seen_logits.logsumexp(-1))
        state = seen.form.add_sink(state)
        if not method.drops_remainder:
            index = search.index if search.partition is None else search.partition
            pieces = index.pieces(q, seen.sinks, seen.search_end, None, position)
            ids = torch.arange(position + 1, dtype=torch.int32).expand(H, 1, -1)
            raw = torch.einsum("htgd,hnd->htgn", q, keys)
            exact = ExactKeys(ids, attended[:, None], raw, values[:, None])
            left = remainder_state(method.remainder, pieces, [exact], seen.form)
            state = state.merge(left)
        outs.append(state.out)
    return torch.cat(outs, dim=1)


@cache
def prepared(name: str) -> tuple[Method, Tensor, LayerSearch]:
    method = replace(with_budget(ALL_METHODS[name], 0.1), recent=RECENT, append_block=BLOCK)
    kv = context(COUNT)
    return method, kv, build_search(method, kv, G)


SINK, CAPPED = LogitForm(sink_HG=torch.ones(H, G)), LogitForm(cap=20.0)


@crossed(
    {
        "way, form": [
            *((way, PLAIN) for way in (step, steps_together, prompt, shared_prompt)),
            (steps_together, SINK),
            (shared_prompt, SINK),
            (step, CAPPED),
            (prompt, CAPPED),
        ],
        "name": ALL_METHODS,
    }
)
def test_every_way_attends_to_what_was_selected_and_to_the_rest(
    name: str, way: Callable[[Make], None], form: LogitForm
) -> None:
    method, kv, search = prepared(name)
    found: list[tuple[Tensor, Tensor]] = []

    def make() -> SparseLayer:
        layer = SparseLayer(kv, search, method, Figures(), form=form)
        # Compared at once: what is told are views of a tail that grows.
        layer.observer = lambda seen: found.append((seen.out_HTGD, expected(seen, search, method)))
        return layer

    way(make)
    assert found
    # A CPU's loop rounds the weights of coarse rows to 127 units of the largest beside them.
    close = 2e-2 if method.remainder.name == "coarse" else 1e-4
    for out, wanted in found:
        torch.testing.assert_close(out, wanted, rtol=close, atol=close)


N, STEPS, PERIOD = 300, 12, 4


def chosen(seen: Observation) -> list[set[int]]:
    """Selected keys by KV head."""
    ids, counts = seen.selection.ids_HTK[:, 0], seen.selection.counts_HT[:, 0]
    return [set(row[:count].tolist()) for row, count in zip(ids, counts, strict=True)]


def test_a_period_reuses_the_selection_and_searches_again_after_it() -> None:
    """But for a prompt, which is searched position by position."""
    method = replace(get_method("csattention", 0.1), recent=8, append_block=4)
    kv, figures = context(N), [Figures(), Figures()]
    search = build_search(method, kv, G)
    seen: list[list[Observation]] = [[], []]
    layers = [
        SparseLayer(kv, search, replace(method, period=period), own)
        for period, own in zip((PERIOD, 1), figures, strict=True)
    ]
    for layer, told in zip(layers, seen, strict=True):
        layer.observer = told.append
        for step in range(STEPS):
            layer.attend(*tokens(1, step), N + step)
    for step, one in enumerate(seen[0]):
        assert chosen(one) == chosen(seen[1][step // PERIOD * PERIOD])
        assert (one.vectors_read + one.bytes_read > 0) == (step % PERIOD == 0)
    assert [own.searches for own in figures] == [STEPS / PERIOD, STEPS]
    layers[0].attend(*tokens(20, 99), N + STEPS)
    assert figures[0].searches == STEPS / PERIOD + 20


def test_a_repeated_step_uses_the_same_selection_again() -> None:
    method, kv = replace(get_method("oracle", 0.1), recent=8, append_block=4, period=3), context(N)
    search = build_search(method, kv, G)
    outs: list[list[torch.Tensor]] = []
    for times in (1, 2):
        layer = SparseLayer(kv, search, method, Figures())
        outs.append([layer.attend(*tokens(1, step), N + step) for step in range(STEPS) for _ in range(times)])
    assert all(torch.equal(one, two) for one, two in zip(outs[0], outs[1][1::2], strict=True))


class Sessions:
    """Layers of sessions on one context, and how many tokens each has had."""

    def __init__(self, methods: list[Method], count: int, form: LogitForm = PLAIN) -> None:
        kv = context(count, torch.bfloat16)
        assert methods[0].index is not None
        search = LayerSearch(build_index(methods[0].index, kv, G))
        self.layers = [SparseLayer(kv, search, method, Figures(), form=form) for method in methods]
        self._taken = [0] * len(methods)
        self._count = count

    def step(self, members: list[int]) -> list[Tensor]:
        calls = []
        for number in members:
            new = tokens(1, 1000 * number + self._taken[number])
            calls.append((self.layers[number], *new, self._count + self._taken[number]))
            self._taken[number] += 1
        return attend_sparse_together(calls)


BUDGETS = [Ratio(0.02), Ratio(0.3), TokenCount(7)]


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(["refined", "refined-3"]),
    count=st.sampled_from([1, 5, 130, 700, 2300]),
    groups=st.lists(st.permutations(range(5)).flatmap(lambda p: st.integers(1, 5).map(lambda n: p[:n]))),
    budgets=st.lists(st.sampled_from(BUDGETS), min_size=5, max_size=5),
    recent=st.integers(1, 6),
    sink=st.booleans(),
)
def test_a_session_gets_the_same_bits_alone_and_in_any_group(
    name: str, count: int, groups: list[list[int]], budgets: list[Ratio], recent: int, sink: bool
) -> None:
    method = replace(get_method(name), recent=recent, append_block=4)
    methods = [replace(method, budget=budget) for budget in budgets]
    form = LogitForm(sink_HG=torch.ones(H, G)) if sink else PLAIN
    together, alone = Sessions(methods, count, form), Sessions(methods, count, form)
    for members in groups:
        for number, out in zip(members, together.step(list(members)), strict=True):
            assert torch.equal(alone.step([number])[0], out)
    for one, other in zip(together.layers, alone.layers, strict=True):
        for figure in ("kept", "attended", "available", "sparse_attended", "sparse_available", "searches"):
            assert getattr(one._figures, figure) == getattr(other._figures, figure)


def test_groups_whose_scores_are_many_attend_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [get_method("refined", 0.05)] * 7
    whole, parts = Sessions(methods, 400), Sessions(methods, 400)
    expected = whole.step(list(range(7)))
    monkeypatch.setattr(sparse_layer, "_GROUP_SCORE_BYTES", 4 * 4 * H * G * 256)
    ranked: list[int] = []
    rank = parts.layers[0].sharing
    together = rank.best_together

    def counting(asked: list[Asked], keeps: list[int]) -> object:
        ranked.append(len(asked))
        return together(asked, keeps)

    monkeypatch.setattr(rank, "best_together", counting)
    for one, other in zip(parts.step(list(range(7))), expected, strict=True):
        assert torch.equal(one, other)
    assert ranked == [4, 3]


def test_which_layers_attend_together() -> None:
    kv = context(100)

    def sharing(method: Method, form: LogitForm = PLAIN) -> bool:
        return SparseLayer(kv, build_search(method, kv, G), method, Figures(), form=form).sharing is not None

    assert {name for name, method in ALL_METHODS.items() if sharing(method)} == {"refined", "refined-3"}
    refined = ALL_METHODS["refined"]
    for budget in (Mass(0.9), Threshold(threshold=0.01)):
        assert not sharing(replace(refined, budget=budget))
    assert not sharing(replace(refined, period=2))
    assert not sharing(refined, LogitForm(cap=20.0))
    assert sharing(replace(refined, budget=TokenCount(3)))
