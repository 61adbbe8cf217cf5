"""A chunk file that is intact but not the one that was written in its place is found, wherever it came from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest
import torch

from index_store.errors import ChecksumError, InvalidArgumentError
from index_store.memory.arena import Arena
from index_store.store.catalog import Store
from index_store.store.description.array_shapes import index_array_entry
from index_store.store.stored_context import raw_bytes
from index_store.store.zarr_io import CHECKSUM_BYTES, chunk_path, read_chunk_into
from tests.support.memory import load_context
from tests.support.store import KINDS, SyntheticContext, synthetic_context

ARRAYS = [entry.path for entry in synthetic_context().draft.arrays]
INTACT = "is intact but not the one that was written"


def chunk(store: Store, context: SyntheticContext, array: str, *indices: int) -> Path:
    entry = next(entry for entry in context.draft.arrays if entry.path == array)
    return chunk_path(store.path / "contexts" / context.id, entry, indices)


def swap(first: Path, second: Path) -> None:
    between = first.with_name("between")
    first.rename(between)
    second.rename(first)
    between.rename(second)


def seal(contents: bytes) -> bytes:
    """A chunk file with these contents and the checksum that belongs to them."""
    checksum: int = google_crc32c.value(contents)
    return contents + checksum.to_bytes(CHECKSUM_BYTES, "little")


def uses(store: Store, context: SyntheticContext) -> list[Callable[[], object]]:
    """Ways to start using a context."""
    arena = Arena(1 << 20, kinds=KINDS)
    return [lambda: store.open(context.id), lambda: arena.acquire(store, context.id).__enter__()]


def assert_found(store: Store, context: SyntheticContext, bad: dict[Path, str]) -> None:
    """`verify` names exactly these files with their arrays; opening and loading name one of them."""
    errors = store.verify(context.id)
    assert {Path(error.metadata["path"]): error.metadata["array"] for error in errors} == bad
    assert len(errors) == len(bad)
    for use in uses(store, context):
        with pytest.raises(ChecksumError) as caught:
            use()
        errors = [*errors, caught.value]
    for error in errors:
        path = Path(error.metadata["path"])
        assert type(error) is ChecksumError
        assert f"{path}: this chunk of array {bad[path]!r} {INTACT}" in error.message
        found = path.read_bytes()[-CHECKSUM_BYTES:][::-1].hex()
        assert error.metadata["found"] == error.metadata["trailer"] == found
        assert error.metadata["expected"] != found


@pytest.mark.parametrize("array", ARRAYS[1:])
def test_swapped_within_an_array(stored: Store, context: SyntheticContext, array: str) -> None:
    """Every pair of (layer, head): other heads, other layers, both."""
    entry = next(entry for entry in context.draft.arrays if entry.path == array)
    for pair in itertools.combinations(entry.chunk_indices(), 2):
        first, second = (chunk(stored, context, array, *indices) for indices in pair)
        swap(first, second)
        assert_found(stored, context, {first: array, second: array})
        swap(first, second)
    assert stored.verify(context.id) == []
    for use in uses(stored, context):
        use()


def test_swapped_between_arrays_of_equal_shape(store: Store) -> None:
    context = synthetic_context()
    (index,) = context.draft.indexes
    original = index.arrays[0]
    twin = index_array_entry("tables", "twin", original.shape[0], original.shape[1:], original.dtype)
    draft = replace(context.draft, indexes=(replace(index, arrays=(*index.arrays, twin)),))
    arrays = context.arrays | {twin.path: context.arrays[original.path].flip(-1)}
    context = replace(context, draft=draft, arrays=arrays)
    context.write(store)
    assert store.verify(context.id) == []
    paths = {chunk(store, context, entry.path, 1, 0): entry.path for entry in (original, twin)}
    swap(*paths)
    assert_found(store, context, paths)


@pytest.mark.parametrize("array", ARRAYS)
def test_swapped_between_contexts(stored: Store, context: SyntheticContext, array: str) -> None:
    other = synthetic_context(seed=1)
    other.write(stored)
    mine, theirs = chunk(stored, context, array, 0), chunk(stored, other, array, 0)
    swap(mine, theirs)
    assert_found(stored, context, {mine: array})
    assert_found(stored, other, {theirs: array})
    swap(mine, theirs)
    assert stored.verify(context.id) == stored.verify(other.id) == []


@pytest.mark.parametrize("array", ARRAYS)
def test_rewritten_with_a_checksum_of_its_own(stored: Store, context: SyntheticContext, array: str) -> None:
    path = chunk(stored, context, array, 0)
    contents = bytearray(path.read_bytes()[:-CHECKSUM_BYTES])
    contents[len(contents) // 2] ^= 4
    path.write_bytes(seal(bytes(contents)))
    assert_found(stored, context, {path: array})
    path.write_bytes(seal(bytes(len(contents))))
    assert_found(stored, context, {path: array})


def test_swapped_after_opening(stored: Store, context: SyntheticContext) -> None:
    opened = stored.open(context.id)
    first, second = (chunk(stored, context, "kv", layer, 1) for layer in (1, 2))
    swap(first, second)
    with pytest.raises(ChecksumError, match=INTACT):
        load_context(opened, kinds=KINDS)
    out = torch.empty(37, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(ChecksumError, match=INTACT):
        opened.read_head("kv", 2, 1, out)
    opened.read_head("kv", 0, 1, out)
    assert torch.equal(out, context.kv[0, 1])


def test_contents_of_another_chunk_under_the_right_checksum(stored: Store, context: SyntheticContext) -> None:
    """Opening looks at checksums alone; contents are compared with them when they are read."""
    first, second = (chunk(stored, context, "kv", 0, head) for head in (0, 1))
    first.write_bytes(second.read_bytes()[:-CHECKSUM_BYTES] + first.read_bytes()[-CHECKSUM_BYTES:])
    opened = stored.open(context.id)
    with pytest.raises(ChecksumError, match="altered or damaged"):
        load_context(opened, kinds=KINDS)
    (error,) = stored.verify(context.id)
    assert "altered or damaged" in error.message
    assert error.metadata["trailer"] == error.metadata["expected"] != error.metadata["found"]


def test_a_context_with_exchanged_chunks_is_replaced(stored: Store, context: SyntheticContext) -> None:
    swap(*(chunk(stored, context, "kv", 0, head) for head in (0, 1)))
    context.write(stored)
    assert stored.verify(context.id) == []


def test_exchanged_before_publishing(store: Store) -> None:
    context = synthetic_context(index_dtypes=(), query_rows=0)
    kv = context.draft.kv
    with store.writer(context.id) as writer:
        writer.write_tokens(context.tokens)
        writer.create_array(kv.path, kv.shape, kv.chunks, kv.dtype)
        for layer, head in itertools.product(range(3), range(2)):
            writer.write_chunk("kv", (layer, head), context.kv[layer, head])
        (temporary,) = (store.path / "contexts").iterdir()
        first, second = (chunk_path(temporary, kv, (layer, 0)) for layer in (0, 2))
        swap(first, second)
        with pytest.raises(ChecksumError, match=INTACT):
            writer.publish(context.draft)
        writer.write_chunk("kv", (0, 0), context.kv[0, 0])
        writer.write_chunk("kv", (2, 0), context.kv[0, 0])  # written twice: the last one counts
        writer.write_chunk("kv", (2, 0), context.kv[2, 0])
        assert writer.publish(context.draft) == context.manifest
    assert store.verify(context.id) == []


def test_reading_needs_the_checksums(stored: Store, context: SyntheticContext) -> None:
    entry = context.draft.kv
    buffer = torch.empty(entry.chunk_bytes, dtype=torch.uint8)
    with pytest.raises(InvalidArgumentError, match="kv: no checksums are known"):
        read_chunk_into(stored.path / "contexts" / context.id, entry, (0, 0), raw_bytes(buffer))
