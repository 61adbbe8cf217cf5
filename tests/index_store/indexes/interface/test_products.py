"""What indexes are made of: rows that grow, and products of many queries in tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.classes import INDEX_CLASSES
from index_store.indexes.interface import layer_index as many_queries
from index_store.indexes.interface.layer_index import GrowingRows, LayerSource, are_many
from index_store.indexes.query_tables.index import sum_rows_by_products
from index_store.indexes.query_tables.search_numba import TableReads, sum_rows_reference
from index_store.methods.presets import get_method
from index_store.store.stored_context import QuerySample

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, POSITIONS, GROUP, KEYS, APPENDED = 2, 5, 3, 90, 20
RANGES = [(0, 90), (7, 64), (8, 101), (95, 110), (50, 50)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("first", "end"), RANGES)
def test_rows_of_tables(first: int, end: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_queries, "_TILE_BYTES", 4 * HEADS * 32 * 13)
    generator = torch.Generator().manual_seed(first)

    def table(columns: int) -> Tensor:
        return torch.randint(-127, 128, (HEADS, 32, columns), dtype=torch.int8, generator=generator).to(
            device
        )

    rows = torch.randint(0, 32, (HEADS, POSITIONS, GROUP, 6), dtype=torch.int32, generator=generator)
    weights = torch.rand(rows.shape, generator=generator)
    reads = TableReads(table(KEYS), table(APPENDED), rows.to(device), weights.to(device), first, end)
    found = sum_rows_by_products(reads)
    assert found.shape == (HEADS, POSITIONS, GROUP, end - first)
    torch.testing.assert_close(found, sum_rows_reference(reads), rtol=1e-4, atol=1e-2)


def test_only_devices_are_asked_so() -> None:
    assert not are_many(torch.empty(1, 500, 4))
    assert are_many(torch.empty(1, 16, 4, device="meta"))
    assert not are_many(torch.empty(1, 15, 4, device="meta"))


@pytest.mark.parametrize("device", DEVICES)
def test_an_index_ranks_many_queries_like_few(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 positions of 2 heads are multiplied, 20 of them looked up; on the CPU, too, which is taken for a device."""
    monkeypatch.setattr(many_queries, "on_host", lambda tensor: False)
    generator = torch.Generator(device).manual_seed(0)
    kv = torch.randn(2, 700, 2, 64, generator=generator, device=device)
    queries = torch.randn(2, 300, 2, 64, generator=generator, device=device)
    assert are_many(queries)
    assert not are_many(queries[:, :20])
    method = get_method("csattention")
    spec = method.index
    source = LayerSource(kv, QuerySample(queries, torch.arange(300)))
    index = INDEX_CLASSES[spec.kind].build(spec.parameters, source, 0)
    asked = queries / 8
    whole = index.rank(asked, 5, 650, None, method.search, 700).logits_HTGM
    few = [
        index.rank(asked[:, at : at + 20], 5, 650, None, method.search, 700).logits_HTGM
        for at in range(0, 300, 20)
    ]
    torch.testing.assert_close(whole, torch.cat(few, dim=1), rtol=1e-3, atol=1e-3)


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
