"""Compiled loops of selections equal their references: lists collected, best keys, searchable members, remainders."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from index_store.selection.collect_numba import (
    collect,
    collect_reference,
    searchable_members,
    searchable_members_reference,
)
from index_store.selection.ranking import Items, Members
from index_store.selection.remainders_numba import (
    cluster_sums,
    cluster_sums_reference,
    leave_out,
    leave_out_reference,
)
from index_store.selection.top_k_numba import top_k, top_k_reference
from tests.support.devices import crossed

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
