"""Keys outside of the searched range leave their items."""

from __future__ import annotations

import torch

from index_store.selection.ranking import Items, Members
from index_store.selection.searchable_numba import searchable_members, searchable_members_reference


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
