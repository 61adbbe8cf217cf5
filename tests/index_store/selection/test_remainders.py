"""Remainders: what is counted, what is exact, which is closer; compiled loops of selections equal their references."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.selection.budgets import COARSE, REMAINDERS
from index_store.selection.collect_numba import (
    collect,
    collect_reference,
    searchable_members,
    searchable_members_reference,
)
from index_store.selection.ranking import ClusteredKeys, Items, Members, ScoredClusters
from index_store.selection.remainder_states import ExactKeys, remainder_state
from index_store.selection.remainders_numba import (
    cluster_sums,
    cluster_sums_reference,
    leave_out,
    leave_out_reference,
)
from index_store.selection.top_k_numba import top_k, top_k_reference
from tests.support.devices import crossed

H, T, G, D = 2, 3, 2, 8


def clusters_of(kv_HN2D: Tensor, assignment_HN: Tensor, count: int, first_id: int = 0) -> ClusteredKeys:
    """Moments by definition, cluster by cluster."""
    keys, values = kv_HN2D[:, :, 0], kv_HN2D[:, :, 1]
    heads, _, dim = keys.shape
    counts, means = torch.zeros(heads, count), torch.zeros(heads, count, dim)
    sums, variances = torch.zeros(heads, count, dim), torch.zeros(heads, count, dim)
    for head in range(heads):
        for cluster in range(count):
            k, v = (part[head, assignment_HN[head] == cluster] for part in (keys, values))
            counts[head, cluster] = len(k)
            if len(k):
                means[head, cluster], sums[head, cluster] = k.mean(0), v.sum(0)
                variances[head, cluster] = k.var(0, unbiased=False)
    return ClusteredKeys(counts, means, sums, assignment_HN.to(torch.int32), first_id, variances)


def piece_of(q: Tensor, clusters: ClusteredKeys) -> ScoredClusters:
    logits = torch.einsum("htgd,hcd->htgc", q, clusters.means_HCD)
    return ScoredClusters(
        clusters, logits.masked_fill((clusters.counts_HC == 0)[:, None, None], -torch.inf), q
    )


def exact_keys(q: Tensor, kv: Tensor, kept_HTN: Tensor) -> ExactKeys:
    """The keys marked in kept_HTN, padded with the key 0."""
    width = int(kept_HTN.sum(-1).max())
    order = kept_HTN.int().sort(dim=-1, descending=True, stable=True)
    ids = torch.where(order.values.bool(), order.indices, 0)[..., :width]
    valid = order.values.bool()[..., :width]
    rows = kv[torch.arange(len(kv))[:, None, None], ids]
    logits = torch.einsum("htgd,htkd->htgk", q, rows[:, :, :, 0])
    return ExactKeys(ids.to(torch.int32), valid, logits, rows[:, :, :, 1])


def attention(q: Tensor, kv: Tensor, seen_HTN: Tensor) -> AttentionState:
    logits = torch.einsum("htgd,hnd->htgn", q.double(), kv[:, :, 0].double())
    logits = logits.masked_fill(~seen_HTN[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - torch.where(torch.isneginf(lse), 0, lse).unsqueeze(-1)).exp()
    out = torch.einsum("htgn,hnd->htgd", weights, kv[:, :, 1].double())
    return AttentionState(out.float(), lse.float())


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(["monopole", "centred"]),
    seed=st.integers(0, 10_000),
    keys=st.integers(1, 40),
    count=st.integers(1, 8),
    share=st.floats(0, 1),
)
def test_members_that_are_alike_make_every_remainder_exact(
    name: str, seed: int, keys: int, count: int, share: float
) -> None:
    """Then selected keys and remainder are full attention: nothing counts twice, nothing is lost."""
    generator = torch.Generator().manual_seed(seed)
    assignment = torch.randint(0, count, (H, keys), generator=generator)
    centres = torch.randn(H, count, D, generator=generator)
    kv = torch.stack(
        [
            centres.gather(1, assignment[..., None].expand(-1, -1, D)),
            torch.randn(H, keys, D, generator=generator),
        ],
        dim=2,
    )
    q = torch.randn(H, T, G, D, generator=generator)
    kept = torch.rand(H, T, keys, generator=generator) < share
    pieces = [piece_of(q, clusters_of(kv, assignment, count))]
    left = remainder_state(REMAINDERS[name], pieces, [exact_keys(q, kv, kept)])
    expected = attention(q, kv, ~kept)
    torch.testing.assert_close(left.lse, expected.lse, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(left.out, expected.out, rtol=1e-3, atol=2e-3)
    whole = left.merge(attention(q, kv, kept))
    full = attention(q, kv, torch.ones_like(kept))
    torch.testing.assert_close(whole.out, full.out, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["monopole", "centred"])
def test_nothing_left_is_an_empty_state(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(H, 12, 2, D, generator=generator)
    q = torch.randn(H, T, G, D, generator=generator)
    assignment = torch.arange(12).expand(H, -1) % 3
    everything = exact_keys(q, kv, torch.ones(H, T, 12, dtype=torch.bool))
    left = remainder_state(REMAINDERS[name], [piece_of(q, clusters_of(kv, assignment, 4))], [everything])
    assert torch.isneginf(left.lse).all()
    assert (left.out == 0).all()


def test_a_cluster_of_one_key_left_is_exact_when_centred() -> None:
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(H, 2, 2, D, generator=generator)
    kv[:, 1, 0] = kv[:, 0, 0] + 0.01
    q = torch.randn(H, T, G, D, generator=generator)
    kept = torch.tensor([True, False]).expand(H, T, -1)
    clusters = clusters_of(kv, torch.zeros(H, 2, dtype=torch.long), 1)
    left = remainder_state(REMAINDERS["centred"], [piece_of(q, clusters)], [exact_keys(q, kv, kept)])
    expected = attention(q, kv, ~kept)
    torch.testing.assert_close(left.out, expected.out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(left.lse, expected.lse, rtol=0, atol=1e-3)


def test_pieces_and_exact_keys_in_several_parts_add_up() -> None:
    """Two partitions of halves of the keys, and exact keys given in two sets, one of them for all positions."""
    generator = torch.Generator().manual_seed(2)
    kv = torch.randn(H, 40, 2, D, generator=generator)
    q = torch.randn(H, T, G, D, generator=generator)
    assignment = torch.randint(0, 5, (H, 40), generator=generator)
    halves = [
        piece_of(q, clusters_of(kv[:, :20], assignment[:, :20], 5)),
        piece_of(q, clusters_of(kv[:, 20:], assignment[:, 20:], 5, first_id=20)),
    ]
    apart = torch.where(torch.arange(40) < 20, assignment, assignment + 5)
    whole = piece_of(q, clusters_of(kv, apart, 10))
    kept = torch.rand(H, T, 40, generator=generator) < 0.2
    kept[..., 30:] = False
    last = exact_keys(q, kv, (torch.arange(40) >= 35).expand(H, T, -1))
    shared = ExactKeys(last.ids_HTK[:, :1], last.valid_HTK[:, :1], last.logits_HTGK, last.values_HTKD[:, :1])
    both = kept | (torch.arange(40) >= 35)
    for name in ("monopole", "centred"):
        one = remainder_state(REMAINDERS[name], halves, [exact_keys(q, kv, kept), shared])
        two = remainder_state(REMAINDERS[name], [whole], [exact_keys(q, kv, both)])
        torch.testing.assert_close(one.out, two.out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.lse, two.lse, rtol=1e-4, atol=1e-5)


def test_closer_approximations_have_smaller_errors() -> None:
    """On clusters with values that follow their keys: centred < monopole < dropped."""
    generator = torch.Generator().manual_seed(3)
    keys, count = 600, 30
    assignment = torch.arange(keys).expand(H, -1) % count
    centres = torch.randn(H, count, D, generator=generator)
    k = centres[:, assignment[0]] + 0.5 * torch.randn(H, keys, D, generator=generator)
    mix = torch.randn(D, D, generator=generator)
    v = k @ mix + 0.3 * torch.randn(H, keys, D, generator=generator)
    kv = torch.stack([k, v], dim=2)
    q = torch.randn(H, T, G, D, generator=generator)
    weights = torch.einsum("htgd,hnd->htgn", q, k).softmax(-1).sum(2)
    kept = torch.zeros(H, T, keys, dtype=torch.bool).scatter(-1, weights.topk(30).indices, True)
    full = attention(q, kv, torch.ones_like(kept)).out
    selected = attention(q, kv, kept)
    pieces = [piece_of(q, clusters_of(kv, assignment, count))]
    errors = {}
    for name, remainder in REMAINDERS.items():
        if remainder is COARSE:
            continue
        left = remainder_state(remainder, pieces, [exact_keys(q, kv, kept)])
        out = (selected if left is None else selected.merge(left)).out
        errors[name] = float((out - full).norm() / full.norm())
    assert errors["centred"] < errors["monopole"] < errors["dropped"]


HEADS, POSITIONS = 2, 3


def groups(generator: torch.Generator, keys: int, items: int, first: int) -> Members:
    """Random items over `keys` keys from `first` on, some of them empty."""
    owners = torch.randint(0, items, (HEADS, keys), generator=generator)
    order = owners.argsort(dim=1, stable=True)
    sizes = torch.stack([torch.bincount(row, minlength=items) for row in owners])
    offsets = torch.nn.functional.pad(sizes.cumsum(1), (1, 0))
    return Members(offsets.to(torch.int32), (order + first).to(torch.int32))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    group=st.integers(1, 3),
    keys=st.integers(1, 60),
    appended=st.integers(0, 20),
    first=st.integers(0, 5),
    cut=st.integers(0, 6),
    single=st.booleans(),
)
def test_the_kernel_equals_sets(
    seed: int, group: int, keys: int, appended: int, first: int, cut: int, single: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = min(first, keys - 1)
    end = max(first + 1, keys + appended - cut)
    members: tuple[Members, ...] = ()
    count = end - first
    if not single:
        members = (groups(generator, keys, 1 + keys // 4, 0),)
        if appended:
            members += (groups(generator, appended, 1 + appended // 4, keys),)
        count = sum(part.sizes_HM.shape[1] for part in members)
    items = Items(first, end, members)
    shape = (HEADS, POSITIONS, group)
    order = torch.rand(*shape, count, generator=generator).argsort(-1)
    taken = torch.randint(0, count + 1, shape, generator=generator)
    limits = torch.randint(0, keys + appended + 3, shape, generator=generator)
    ids, counts = collect(order, taken, limits, items)
    expected_ids, expected_counts = collect_reference(order, taken, limits, items)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(ids, expected_ids)


def test_nothing_to_collect() -> None:
    ids, counts = collect(torch.zeros(1, 1, 1, 4), torch.tensor([[[4]]]), torch.tensor([[[0]]]), Items(0, 4))
    assert ids.shape == (1, 1, 0)
    assert counts.tolist() == [[0]]


@crossed(
    {
        "columns": [1, 5, 63, 100, 500, 4097, 20000],
        "keep": [1, 3, 50, 100_000],
        "kind": ["normal", "ties", "sparse", "constant", "signed zeros"],
    }
)
def test_top_k_equals_stable_sort(columns: int, keep: int, kind: str) -> None:
    scores = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(columns + keep))
    if kind == "ties":
        scores = (scores * 2).round()
    elif kind == "sparse":
        scores[:, :, ::3] = -torch.inf
        scores[0, 0] = -torch.inf
    elif kind == "constant":
        scores = torch.full_like(scores, -2.5)
    elif kind == "signed zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    ids, counts = top_k(scores, keep)
    expected_ids, expected_counts = top_k_reference(scores, keep)
    assert torch.equal(counts, expected_counts)
    valid = torch.arange(ids.shape[-1]) < counts[..., None]
    assert torch.equal(ids[valid], expected_ids[valid])


def test_top_k_of_nothing() -> None:
    ids, counts = top_k(torch.empty(2, 3, 0), 5)
    assert ids.shape == (2, 3, 0)
    assert torch.equal(counts, torch.zeros(2, 3, dtype=torch.int32))


def test_kernels_run_from_many_threads_at_once() -> None:
    scores = torch.randn(2, 2, 3000)
    expected = top_k_reference(scores, 40)[0]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(10):
            if not torch.equal(top_k(scores, 40)[0], expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_keys_outside_of_the_range_are_not_members() -> None:
    generator = torch.Generator().manual_seed(0)
    for first, end in ((0, 60), (5, 50), (59, 60), (20, 20), (70, 80)):
        groups = []
        for begin, count in ((0, 40), (40, 20)):
            keys = torch.stack([torch.randperm(count, generator=generator) + begin for _ in range(2)])
            cuts = torch.randint(0, count + 1, (2, 6), generator=generator).sort(dim=1).values
            offsets = torch.nn.functional.pad(torch.nn.functional.pad(cuts, (1, 0)), (0, 1), value=count)
            groups.append(Members(offsets.to(torch.int32), keys.to(torch.int32)))
        for items in (Items(first, end, tuple(groups)), Items(first, end, (groups[1],)), Items(first, end)):
            columns = sum(group.offsets_HM.shape[1] - 1 for group in items.groups) or end - first
            found = searchable_members(items, 2, columns)
            expected = searchable_members_reference(items, 2, columns)
            assert torch.equal(found.offsets_HM, expected.offsets_HM)
            for head in range(2):
                held = int(expected.offsets_HM[head, -1])
                assert torch.equal(found.keys_HX[head, :held], expected.keys_HX[head, :held])


@crossed(
    {
        "clusters": [1, 255, 256, 700],
        "positions, group": [(1, 1), (1, 4), (3, 5), (20, 2)],
        "variances": [True, False],
        "slack": [0, 9],
    }
)
def test_it_equals_the_reference(
    clusters: int, positions: int, group: int, variances: bool, slack: int
) -> None:
    """slack: unused rows behind every head's, as growing buffers have."""
    heads, dim = 3, 24
    generator = torch.Generator().manual_seed(clusters + positions)
    logits = -12 * torch.rand(heads, positions, group, clusters, generator=generator)
    logits[..., 0] = 0.0
    logits[..., 1::5] = -torch.inf
    counts = torch.randint(1, 30, (heads, positions, clusters), generator=generator).float()
    queries = torch.randn(heads, positions, group, dim, generator=generator)
    spread, values = (
        torch.rand(heads, clusters + slack, dim, generator=generator)[:, :clusters] for _ in range(2)
    )
    given = (logits, counts, queries, spread if variances else None, values - 0.5)
    found, expected = cluster_sums(*given), cluster_sums_reference(*given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_clusters_without_influence_are_not_read() -> None:
    logits = torch.tensor([0.0, -100.0, -torch.inf]).expand(2, 1, 2, 3)
    values = torch.ones(2, 3, 8)
    values[:, 1:] = torch.nan
    weights, totals, sums = cluster_sums(logits, torch.ones(2, 1, 3), torch.zeros(2, 1, 2, 8), None, values)
    assert torch.equal(weights[0, 0, 0], torch.tensor([1.0, 0.0, 0.0]))
    assert (totals == 1.0).all()
    assert (sums == 1.0).all()


def test_no_clusters_add_nothing() -> None:
    empty = torch.empty(2, 1, 3, 0)
    weights, totals, sums = cluster_sums(
        empty, torch.empty(2, 1, 0), torch.ones(2, 1, 3, 8), None, torch.empty(2, 0, 8)
    )
    assert weights.shape == empty.shape
    assert (totals == 0).all()
    assert (sums == 0).all()


@pytest.mark.parametrize("size", [1, 63, 500])
def test_listed_columns_are_left_out_where_they_count(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    whole = torch.randn(3, 2, 2, size + 3, generator=generator)
    columns = torch.randint(-2, size + 2, (3, 2, 20), generator=generator, dtype=torch.int32)
    counted = torch.rand(columns.shape, generator=generator) < 0.7
    expected = whole.clone()
    leave_out_reference(expected[..., 1:-2], columns, counted)
    leave_out(whole[..., 1:-2], columns, counted)
    assert torch.equal(whole, expected)
    assert size < 10 or 0 < int(torch.isneginf(whole).sum()) < 2 * 2 * 3 * 20
