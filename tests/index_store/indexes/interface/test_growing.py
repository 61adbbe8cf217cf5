"""Rows that grow by doubling."""

from __future__ import annotations

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.growing import GrowingRows


@pytest.mark.parametrize("piece", [1, 7, 100, 300])
def test_rows_stay_and_room_depends_on_their_number_alone(piece: int) -> None:
    wanted = torch.randn(2, 300, 3)
    grown = GrowingRows(2, 3)
    for rows in wanted.split(piece, dim=1):
        grown.append(rows)
    assert torch.equal(grown.rows, wanted)
    assert (grown.count, grown.capacity, grown.nbytes) == (300, 512, 2 * 512 * 3 * 4)


def test_a_buffer_never_grows_beyond_its_limit() -> None:
    grown = GrowingRows(1, 2, limit=100)
    grown.append(torch.ones(1, 70, 2))
    assert grown.capacity == 100


def test_rows_with_addresses_stay_where_they_are_and_hold_their_room_alone() -> None:
    wanted, grown = torch.randn(2, 300, 3), GrowingRows(2, 3, addressed=256)
    assert grown.nbytes == 0
    places = set()
    for rows in wanted.split(50, dim=1):
        grown.append(rows)
        places.add(grown.buffer.data_ptr())
        assert grown.nbytes == 2 * grown.capacity * 3 * 4
        assert len(places) == (1 if grown.count <= 256 else 2)
    assert torch.equal(grown.rows, wanted)
    assert torch.equal(grown.fork().rows, wanted)
    assert grown.capacity == 512


def test_rows_are_written_again_from_a_position_on() -> None:
    grown = GrowingRows(1)
    grown.append(torch.arange(5.0)[None])
    grown.put(2, torch.tensor([[9.0]]))
    assert grown.rows.tolist() == [[0.0, 1.0, 9.0]]
    with pytest.raises(InvalidArgumentError, match=r"rows 3\.\.4 were never written"):
        grown.put(5, torch.ones(1, 1))
