"""Every way in which stored bytes can differ from what was written has its own error, naming file and array."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from index_store.errors import (
    ArrayMetadataError,
    ChecksumError,
    ContextCorruptError,
    FormatVersionError,
    ManifestError,
    MissingChunkError,
    TruncatedChunkError,
)
from index_store.memory.arena import Arena
from index_store.store.catalog import Store
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.sealed import render_document
from index_store.store.stored_context import raw_bytes
from index_store.store.zarr_io import CHECKSUM_BYTES, chunk_path, read_chunk_into
from tests.support.store import KINDS, SyntheticContext, synthetic_context

ARRAYS = [entry.path for entry in synthetic_context().manifest.arrays]
INDEX_ARRAYS = [path for path in ARRAYS if path.startswith("index/")]


@pytest.fixture
def arena() -> Arena:
    return Arena(1 << 20, kinds=KINDS)


def folder(store: Store, context: SyntheticContext) -> Path:
    return store.path / "contexts" / context.id


def entry_of(context: SyntheticContext, path: str) -> ArrayEntry:
    return next(entry for entry in context.manifest.arrays if entry.path == path)


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def load(arena: Arena, store: Store, context: SyntheticContext) -> None:
    """Reads all that can be read: the queries, which are left on disk, and what is served."""
    with store.open(context.id) as opened:
        for layer in range(context.draft.model.layers):
            opened.queries(layer)
    with arena.acquire(store, context.id):
        pass


def assert_only_error(store: Store, context: SyntheticContext, kind: type, array: str, path: Path) -> None:
    """`verify` reports exactly one bad file, by name."""
    (error,) = store.verify(context.id)
    assert type(error) is kind
    assert error.metadata["array"] == array
    assert error.metadata["path"] == str(path)
    assert str(path) in error.message
    assert array in error.message


@pytest.mark.parametrize("array", ARRAYS)
def test_flipped_byte(stored: Store, context: SyntheticContext, arena: Arena, array: str) -> None:
    entry = entry_of(context, array)
    chooser = random.Random(array)
    size = entry.chunk_bytes + CHECKSUM_BYTES
    last = size - 1
    for indices in entry.chunk_indices():
        path = chunk_path(folder(stored, context), entry, indices)
        for position in (0, last, entry.chunk_bytes, *(chooser.randrange(size) for _ in range(5))):
            bit = chooser.randrange(8)
            flip(path, position, bit)
            assert_only_error(stored, context, ChecksumError, array, path)
            with pytest.raises(ChecksumError, match=array) as caught:
                load(arena, stored, context)
            assert caught.value.metadata["path"] == str(path)
            assert arena.stats().used_bytes == 0
            flip(path, position, bit)
    assert stored.verify(context.id) == []
    load(arena, stored, context)


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("change", [-1, 1, -5, 4096, "empty"])
def test_wrong_size(
    stored: Store, context: SyntheticContext, arena: Arena, array: str, change: int | str
) -> None:
    entry = entry_of(context, array)
    path = chunk_path(folder(stored, context), entry, list(entry.chunk_indices())[-1])
    data = path.read_bytes()
    if isinstance(change, str):
        path.write_bytes(b"")
    else:
        path.write_bytes(data[:change] if change < 0 else data + b"\0" * change)
    expected = entry.chunk_bytes + CHECKSUM_BYTES
    with pytest.raises(TruncatedChunkError, match=f"{path.stat().st_size} bytes .*expected {expected}"):
        stored.open(context.id)
    with pytest.raises(TruncatedChunkError):
        load(arena, stored, context)
    assert_only_error(stored, context, TruncatedChunkError, array, path)


@pytest.mark.parametrize("array", ARRAYS)
def test_missing_chunk(stored: Store, context: SyntheticContext, arena: Arena, array: str) -> None:
    entry = entry_of(context, array)
    path = chunk_path(folder(stored, context), entry, list(entry.chunk_indices())[-1])
    path.unlink()
    with pytest.raises(MissingChunkError, match=array):
        stored.open(context.id)
    with pytest.raises(MissingChunkError):
        load(arena, stored, context)
    assert_only_error(stored, context, MissingChunkError, array, path)


@pytest.mark.parametrize("array", INDEX_ARRAYS)
def test_missing_array(stored: Store, context: SyntheticContext, array: str) -> None:
    where = folder(stored, context) / array
    where.rename(stored.path / "elsewhere")
    with pytest.raises(ContextCorruptError, match=array):
        stored.open(context.id)
    errors = stored.verify(context.id)
    assert {type(error) for error in errors} == {ArrayMetadataError, MissingChunkError}
    assert len(errors) == 1 + 2 * 2


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shape", [1]),
        ("data_type", "float64"),
        ("codecs", [{"name": "bytes", "configuration": {"endian": "big"}}]),
        ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [1]}}),
        ("chunk_key_encoding", {"name": "v2", "configuration": {"separator": "."}}),
        ("fill_value", 1),
        ("attributes", {"dtype": "uint8"}),
        ("node_type", "group"),
        ("zarr_format", 2),
        ("surprise", 1),
    ],
)
def test_tampered_metadata(
    stored: Store, context: SyntheticContext, array: str, field: str, value: object
) -> None:
    path = folder(stored, context) / array / "zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ArrayMetadataError, match=f"{field} = .*the manifest says"):
        stored.open(context.id)
    assert_only_error(stored, context, ArrayMetadataError, array, path)


@pytest.mark.parametrize("contents", [None, b"", b"{", b"[]", b"\xff\xff"])
@pytest.mark.parametrize("where", ["kv", "tokens", ".", "index", "index/tables"])
def test_unreadable_metadata(
    stored: Store, context: SyntheticContext, where: str, contents: bytes | None
) -> None:
    path = folder(stored, context) / where / "zarr.json"
    if contents is None:
        path.unlink()
    else:
        path.write_bytes(contents)
    with pytest.raises(ArrayMetadataError, match=f"{where!r}"):
        stored.open(context.id)
    assert [type(error) for error in stored.verify(context.id)] == [ArrayMetadataError]


def test_verify_reports_every_bad_file(stored: Store, context: SyntheticContext) -> None:
    where = folder(stored, context)
    kv, tokens = context.manifest.kv, context.manifest.tokens
    flip(chunk_path(where, kv, (0, 0)), 3)
    flip(chunk_path(where, kv, (2, 1)), 4)
    chunk_path(where, kv, (1, 0)).unlink()
    chunk_path(where, tokens, (0,)).write_bytes(b"12")
    index_array = context.manifest.indexes[0].arrays[2]
    flip(chunk_path(where, index_array, (1, 1)), 5)
    (where / "index" / "zarr.json").write_text("{}")
    found = [(type(error), error.metadata["array"]) for error in stored.verify(context.id)]
    assert sorted(found, key=str) == sorted(
        [
            (ArrayMetadataError, "index"),
            (TruncatedChunkError, "tokens"),
            (ChecksumError, "kv"),
            (MissingChunkError, "kv"),
            (ChecksumError, "kv"),
            (ChecksumError, index_array.path),
        ],
        key=str,
    )


def test_verify_reads_every_byte(stored: Store, context: SyntheticContext) -> None:
    counts: list[int] = []
    assert stored.verify(context.id, counts.append) == []
    assert sum(counts) == sum(entry.nbytes for entry in context.manifest.arrays)


def test_contents_of_one_chunk_with_the_checksum_of_another(stored: Store, context: SyntheticContext) -> None:
    first, second = (chunk_path(folder(stored, context), context.manifest.kv, (0, head)) for head in (0, 1))
    swapped = first.read_bytes()[:-CHECKSUM_BYTES] + second.read_bytes()[-CHECKSUM_BYTES:]
    first.write_bytes(swapped)
    assert_only_error(stored, context, ChecksumError, "kv", first)


def test_damaged_manifest(stored: Store, context: SyntheticContext, arena: Arena) -> None:
    path = folder(stored, context) / "manifest.json"
    size = path.stat().st_size
    for position in random.Random(0).sample(range(size), 25):
        flip(path, position, 1)
        for use in (stored.manifest, stored.open):
            with pytest.raises(ContextCorruptError, match=r"manifest\.json"):
                use(context.id)
        with pytest.raises(ContextCorruptError):
            load(arena, stored, context)
        (error,) = stored.verify(context.id)
        assert isinstance(error, ChecksumError | ManifestError)
        assert error.metadata["path"] == str(path)
        flip(path, position, 1)
    assert stored.verify(context.id) == []


def test_newer_format(stored: Store, context: SyntheticContext, arena: Arena) -> None:
    path = folder(stored, context) / "manifest.json"
    document = json.loads(path.read_bytes())
    del document["checksum"]
    path.write_bytes(render_document(document | {"format_version": 7}))
    for use in (stored.manifest, stored.open, stored.verify):
        with pytest.raises(FormatVersionError, match="version 7, this program reads versions 2 to 6"):
            use(context.id)
    with pytest.raises(FormatVersionError):
        load(arena, stored, context)


def test_reading_without_verification_still_checks_size(stored: Store, context: SyntheticContext) -> None:
    entry = context.manifest.kv
    path = chunk_path(folder(stored, context), entry, (0, 0))
    buffer = torch.empty(entry.chunk_bytes, dtype=torch.uint8)
    flip(path, 0)
    read_chunk_into(folder(stored, context), entry, (0, 0), raw_bytes(buffer), verify=False)
    assert bytes(buffer.numpy()) == path.read_bytes()[:-CHECKSUM_BYTES]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TruncatedChunkError):
        read_chunk_into(folder(stored, context), entry, (0, 0), raw_bytes(buffer), verify=False)
