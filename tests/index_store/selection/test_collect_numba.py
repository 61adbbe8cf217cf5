"""From ranked items to key ids."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from index_store.selection.collect_numba import collect, collect_reference
from index_store.selection.ranking import Items, Members

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
