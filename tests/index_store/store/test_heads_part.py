"""A part of a context's KV heads: the same rows and index arrays, half of the memory, the same checksums."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from index_store.errors import ContextCorruptError, InvalidArgumentError
from index_store.memory.arena import Arena
from index_store.memory.context_loading import placed_bytes
from index_store.store.catalog import Store
from index_store.store.heads_part import HeadsPart
from tests.support.store import KINDS, RecordedIndex, SyntheticContext, flip, other_model, synthetic_context

PARTS = [HeadsPart(rank, 2) for rank in range(2)]


@pytest.fixture(scope="module")
def made() -> SyntheticContext:
    return synthetic_context(model=other_model(kv_heads=4, query_heads=8))


@pytest.fixture
def store(tmp_path: Path, made: SyntheticContext) -> Store:
    store = Store(tmp_path / "store", create=True)
    made.write(store)
    return store


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_loaded_as_a_context_of_fewer_heads(
    store: Store, made: SyntheticContext, part: HeadsPart
) -> None:
    own, manifest = part.of(4), store.manifest(made.id)
    needed = placed_bytes(part.manifest(manifest)).host
    assert needed < 0.6 * placed_bytes(manifest).host
    with Arena(needed, kinds=KINDS, part=part).acquire(store, made.id) as context:
        context.gate.wait_for_all()
        assert (context.manifest.id, context.manifest.model.kv_heads) == (made.id, 2)
        assert context.manifest.model.query_heads == 4
        assert torch.equal(context.tokens(), made.tokens)
        for layer, rows in enumerate(made.kv):
            assert torch.equal(context.kv(layer), rows[own])
        for row, layer in enumerate(manifest.indexes[0].layers):
            index = context.index("tables", layer)
            assert isinstance(index, RecordedIndex)
            for path, data in made.arrays.items():
                assert torch.equal(index.stored[path.rpartition("/")[2]], data[row, own])


def test_damage_of_a_head_is_found_by_the_part_that_has_it(store: Store, made: SyntheticContext) -> None:
    chunk = store.path / "contexts" / made.id / "kv" / "c" / "1" / "3"
    (file,) = [path for path in chunk.rglob("*") if path.is_file()]
    flip(file)
    for part, damaged in zip(PARTS, (False, True), strict=True):
        arena = Arena(2**24, kinds=KINDS, part=part)
        with (
            pytest.raises(ContextCorruptError) if damaged else nullcontext(),
            arena.acquire(store, made.id) as context,
        ):
            context.gate.wait_for_all()


def test_heads_that_cannot_be_divided_are_refused(made: SyntheticContext) -> None:
    with pytest.raises(InvalidArgumentError, match="4 KV heads cannot be divided among 3"):
        HeadsPart(0, 3).manifest(made.draft)
    assert HeadsPart().manifest(made.draft) is made.draft
