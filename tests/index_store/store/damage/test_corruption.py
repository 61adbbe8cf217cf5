"""Every way in which stored bytes can differ from what was written is found, with an error that names file and array.

A chunk may be altered, cut, gone, or intact but not the one that was written in its place, wherever it came from. No
file hides other contexts, and none that does not belong there stays unnamed.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import google_crc32c
import pytest
import torch

from index_store.errors import (
    ArrayMetadataError,
    ChecksumError,
    ContextCorruptError,
    ContextNotFoundError,
    FormatVersionError,
    InvalidArgumentError,
    ManifestError,
    MissingChunkError,
    TruncatedChunkError,
    UnexpectedFileError,
)
from index_store.memory.arena import Arena
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up
from index_store.store.description.array_entry import ArrayEntry, index_array_entry
from index_store.store.description.json_fields import render_document
from index_store.store.description.manifest import MANIFESTS
from index_store.store.listing import BrokenContext
from index_store.store.stored_context import raw_bytes
from index_store.store.zarr_io import CHECKSUM_BYTES, chunk_path, read_chunk
from tests.support.devices import nightly
from tests.support.memory import load_context
from tests.support.store import KINDS, SyntheticContext, flip, synthetic_context, write_manifests

ARRAYS = [entry.path for entry in synthetic_context().manifest.arrays]
INTACT = "is intact but not the one that was written"
ALTERED = "altered or damaged"


def entry_of(context: SyntheticContext, path: str) -> ArrayEntry:
    return next(entry for entry in context.manifest.arrays if entry.path == path)


def chunk(store: Store, context: SyntheticContext, array: str, *indices: int) -> Path:
    return chunk_path(store.folders.context(context.id), entry_of(context, array), indices)


def load(store: Store, context: SyntheticContext) -> None:
    """Reads all that can be read: the queries, which are left on disk, and what is served, by a device's way, too."""
    with store.open(context.id) as opened:
        for layer in range(context.draft.model.layers):
            opened.queries(layer)
    for device in (torch.device("cpu"), None):
        arena = Arena(1 << 20, kinds=KINDS, device=device)
        try:
            with arena.acquire(store, context.id):
                pass
        finally:
            arena.clear()
            assert arena.stats().used.total == 0


def swap(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def seal(contents: bytes) -> bytes:
    """A chunk file with these contents and the checksum that belongs to them."""
    checksum: int = google_crc32c.value(contents)
    return contents + checksum.to_bytes(CHECKSUM_BYTES, "little")


def flip_any(path: Path, other: Path) -> None:
    chooser = random.Random(str(path.parent))
    flip(path, chooser.randrange(path.stat().st_size), chooser.randrange(8))


def join(contents: Path, checksum: Path) -> bytes:
    return contents.read_bytes()[:-CHECKSUM_BYTES] + checksum.read_bytes()[-CHECKSUM_BYTES:]


@dataclass(frozen=True)
class Damage:
    """What is done to a chunk, another one of equal size being at hand; its error; whether opening a context shows it,
    or only reading."""

    do: Callable[[Path, Path], object]
    error: type[ContextCorruptError]
    said: str | None = None
    at_open: bool = True


DAMAGES = {
    "first byte": Damage(lambda path, _: flip(path, 0), ChecksumError, ALTERED, at_open=False),
    "last byte": Damage(
        lambda path, _: flip(path, -CHECKSUM_BYTES - 1), ChecksumError, ALTERED, at_open=False
    ),
    "checksum's first byte": Damage(lambda path, _: flip(path, -CHECKSUM_BYTES, 3), ChecksumError),
    "checksum's last byte": Damage(lambda path, _: flip(path, -1), ChecksumError),
    "any bit": Damage(flip_any, ChecksumError, at_open=False),
    "empty": Damage(lambda path, _: path.write_bytes(b""), TruncatedChunkError, "0 bytes .*expected"),
    "a byte less": Damage(
        lambda path, _: path.write_bytes(path.read_bytes()[:-1]), TruncatedChunkError, "bytes .*expected"
    ),
    "a byte more": Damage(
        lambda path, _: path.write_bytes(path.read_bytes() + b"\0"), TruncatedChunkError, "bytes .*expected"
    ),
    "gone": Damage(lambda path, _: path.unlink(), MissingChunkError),
    "another's": Damage(lambda path, other: path.write_bytes(other.read_bytes()), ChecksumError, INTACT),
    "another's contents": Damage(
        lambda path, other: path.write_bytes(join(other, path)), ChecksumError, ALTERED, at_open=False
    ),
    "another's checksum": Damage(lambda path, other: path.write_bytes(join(path, other)), ChecksumError),
    "zeros with their checksum": Damage(
        lambda path, _: path.write_bytes(seal(bytes(path.stat().st_size - CHECKSUM_BYTES))),
        ChecksumError,
        INTACT,
    ),
}


def assert_found(store: Store, context: SyntheticContext, bad: dict[Path, str], damage: Damage) -> None:
    """`verify` names exactly these files with their arrays; opening, if it shows there, and loading name one."""
    errors = store.verify(context.id)
    assert sorted((Path(error.metadata["path"]), error.metadata["array"]) for error in errors) == sorted(
        bad.items()
    )
    uses: list[Callable[[], object]] = [lambda: load(store, context)]
    for use in [lambda: store.open(context.id), *uses] if damage.at_open else uses:
        with pytest.raises(damage.error, match=damage.said) as caught:
            use()
        errors = [*errors, caught.value]
    for error in errors:
        path = Path(error.metadata["path"])
        assert type(error) is damage.error
        assert str(path) in error.message
        assert repr(bad[path]) in error.message
        if damage.said == INTACT:
            found = path.read_bytes()[-CHECKSUM_BYTES:][::-1].hex()
            assert error.metadata["found"] == error.metadata["trailer"] == found != error.metadata["expected"]


@pytest.mark.parametrize(
    ("array", "damage"),
    [
        *(("kv", damage) for damage in DAMAGES),
        *((array, "any bit") for array in ARRAYS if array != "kv"),
        *nightly(
            *(
                (array, damage)
                for array in ARRAYS
                for damage in DAMAGES
                if array != "kv" and damage != "any bit"
            )
        ),
    ],
)
def test_a_damaged_chunk_is_found(stored: Store, context: SyntheticContext, array: str, damage: str) -> None:
    other = synthetic_context(seed=1)
    other.write(stored)
    for indices in entry_of(context, array).chunk_indices():
        path = chunk(stored, context, array, *indices)
        whole = path.read_bytes()
        DAMAGES[damage].do(path, chunk(stored, other, array, *indices))
        assert_found(stored, context, {path: array}, DAMAGES[damage])
        path.write_bytes(whole)
    assert stored.verify(context.id) == []
    load(stored, context)


@pytest.mark.parametrize("array", [ARRAYS[1], *nightly(*ARRAYS[2:])])
def test_swapped_within_an_array(stored: Store, context: SyntheticContext, array: str) -> None:
    """Every pair of (layer, head): other heads, other layers, both."""
    for pair in itertools.combinations(entry_of(context, array).chunk_indices(), 2):
        first, second = (chunk(stored, context, array, *indices) for indices in pair)
        swap(first, second)
        assert_found(stored, context, {first: array, second: array}, DAMAGES["another's"])
        swap(first, second)
    assert stored.verify(context.id) == []


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
    assert_found(store, context, paths, DAMAGES["another's"])


def test_swapped_after_opening(stored: Store, context: SyntheticContext) -> None:
    opened = stored.open(context.id)
    swap(*(chunk(stored, context, "kv", layer, 1) for layer in (1, 2)))
    with pytest.raises(ChecksumError, match=INTACT):
        load_context(opened, kinds=KINDS)
    out = torch.empty(37, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(ChecksumError, match=INTACT):
        opened.read_head("kv", 2, 1, out)
    opened.read_head("kv", 0, 1, out)
    assert torch.equal(out, context.kv[0, 1])


def test_exchanged_before_publishing(store: Store) -> None:
    context = synthetic_context(index_dtypes=(), query_rows=0)
    kv = context.draft.kv
    with store.writer(context.id) as writer:
        context.write_arrays(writer)
        (temporary,) = (store.path / "contexts").iterdir()
        swap(*(chunk_path(temporary, kv, (layer, 0)) for layer in (0, 2)))
        with pytest.raises(ChecksumError, match=INTACT):
            writer.publish(context.draft)
        writer.write_chunk("kv", (2, 0), context.kv[2, 0])
        path = chunk_path(temporary, kv, (0, 0))
        for damage, error in (("a byte less", TruncatedChunkError), ("checksum's last byte", ChecksumError)):
            writer.write_chunk("kv", (0, 0), context.kv[0, 0])
            DAMAGES[damage].do(path, path)
            with pytest.raises(error, match="kv"):
                writer.publish(context.draft)
        writer.write_chunk("kv", (0, 0), context.kv[0, 0])
        writer.write_chunk("kv", (2, 0), context.kv[0, 0])  # written twice: the last one counts
        writer.write_chunk("kv", (2, 0), context.kv[2, 0])
        assert writer.publish(context.draft) == context.manifest
    assert store.verify(context.id) == []


def test_a_missing_array(stored: Store, context: SyntheticContext) -> None:
    array = ARRAYS[-1]
    (stored.folders.context(context.id) / array).rename(stored.path / "elsewhere")
    with pytest.raises(ContextCorruptError, match=array):
        stored.open(context.id)
    errors = stored.verify(context.id)
    assert {type(error) for error in errors} == {ArrayMetadataError, MissingChunkError}
    assert len(errors) == 1 + 2 * 2


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
def test_tampered_metadata(stored: Store, context: SyntheticContext, field: str, value: object) -> None:
    for array in ARRAYS:
        path = stored.folders.context(context.id) / array / "zarr.json"
        whole = path.read_text()
        path.write_text(json.dumps(json.loads(whole) | {field: value}))
        with pytest.raises(ArrayMetadataError, match=f"{field} = .*the manifest says"):
            stored.open(context.id)
        (error,) = stored.verify(context.id)
        assert (type(error), error.metadata["array"]) == (ArrayMetadataError, array)
        assert error.metadata["path"] == str(path)
        path.write_text(whole)


@pytest.mark.parametrize("contents", [None, b"", b"{", b"[]", b"\xff\xff"])
@pytest.mark.parametrize("where", ["kv", "tokens", ".", "index", "index/tables"])
def test_unreadable_metadata(
    stored: Store, context: SyntheticContext, where: str, contents: bytes | None
) -> None:
    path = stored.folders.context(context.id) / where / "zarr.json"
    if contents is None:
        path.unlink()
    else:
        path.write_bytes(contents)
    with pytest.raises(ArrayMetadataError, match=f"{where!r}"):
        stored.open(context.id)
    assert [type(error) for error in stored.verify(context.id)] == [ArrayMetadataError]


def test_verify_reads_every_byte_and_reports_every_bad_file(stored: Store, context: SyntheticContext) -> None:
    counts: list[int] = []
    assert stored.verify(context.id, counts.append) == []
    assert sum(counts) == sum(entry.nbytes for entry in context.manifest.arrays)
    index_array = context.manifest.indexes[0].arrays[2].path
    flip(chunk(stored, context, "kv", 0, 0), 3)
    flip(chunk(stored, context, "kv", 2, 1), 4)
    chunk(stored, context, "kv", 1, 0).unlink()
    chunk(stored, context, "tokens", 0).write_bytes(b"12")
    flip(chunk(stored, context, index_array, 1, 1), 5)
    (stored.folders.context(context.id) / "index" / "zarr.json").write_text("{}")
    found = [(type(error), error.metadata["array"]) for error in stored.verify(context.id)]
    expected = [
        *((ArrayMetadataError, "index"), (TruncatedChunkError, "tokens"), (MissingChunkError, "kv")),
        *((ChecksumError, "kv"), (ChecksumError, "kv"), (ChecksumError, index_array)),
    ]
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_reading_needs_checksums(stored: Store, context: SyntheticContext) -> None:
    where, buffer = (
        stored.folders.context(context.id),
        torch.empty(context.manifest.kv.chunk_bytes, dtype=torch.uint8),
    )
    with pytest.raises(InvalidArgumentError, match="kv: no checksums are known"):
        read_chunk(where, context.draft.kv, (0, 0), raw_bytes(buffer))


BAD = {"empty": b"", "newer": render_document({"format_version": 2**40})}


@pytest.mark.parametrize("kind", BAD)
def test_one_bad_context_hides_no_other(tmp_path: Path, context: SyntheticContext, kind: str) -> None:
    store = Store(tmp_path / "store", create=True)
    context.write(store)
    (bad,) = write_manifests(store.path, 1)
    path = store.path / "contexts" / bad / "manifest.json"
    path.write_bytes(BAD[kind])
    entry, broken = store.entries()
    assert entry == context.manifest
    assert isinstance(broken, BrokenContext)
    assert (broken.id, str(path) in broken.error.message) == (bad, True)
    assert store.resolve("handbook") == context.id
    assert store.resolve(bad[:10]) == bad
    assert clean_up(store) == []
    assert store.verify(context.id) == []
    with pytest.raises((ContextCorruptError, FormatVersionError)):
        store.manifest(bad)
    store.delete(bad)
    with pytest.raises(ContextNotFoundError):
        store.manifest(bad)
    assert store.entries() == [context.manifest]


def test_a_manifest_of_absurd_size_is_not_read(stored: Store, context: SyntheticContext) -> None:
    path = stored.path / "contexts" / context.id / "manifest.json"
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a hole, which takes no space
    with pytest.raises(ManifestError, match="a file of more than 67108864 bytes"):
        stored.manifest(context.id)


def test_sizes_that_no_memory_holds_are_not_allocated(store: Store) -> None:
    """Verifying what claims to be immense says which file is too short."""
    context = synthetic_context()
    document = json.loads(MANIFESTS.render(context.manifest))
    del document["checksum"]
    tokens = 2**40
    document["model"]["max_positions"] = document["token_count"] = tokens
    document["tokens"].update(shape=[tokens], chunks=[tokens])
    for field in ("shape", "chunks"):
        document["kv"][field][2] = tokens
    context.write(store)
    path = store.path / "contexts" / context.id / "manifest.json"
    path.write_bytes(render_document(document))
    errors = store.verify(context.id)
    assert {"CHUNK_TRUNCATED", "ARRAY_METADATA_INVALID"} == {error.reason for error in errors}


def test_verify_names_files_that_are_not_part_of_the_context(
    stored: Store, context: SyntheticContext, tmp_path: Path
) -> None:
    folder = stored.path / "contexts" / context.id
    strays = [folder / "kv" / "c" / "notes.txt", folder / "left" / "over", folder / "link"]
    strays[0].write_text("stray")
    strays[1].parent.mkdir()
    strays[1].touch()
    strays[2].symlink_to(tmp_path, target_is_directory=True)
    problems = stored.verify(context.id)
    assert {type(problem) for problem in problems} == {UnexpectedFileError}
    assert sorted(problem.metadata["path"] for problem in problems) == sorted(map(str, strays))
    stored.open(context.id).close()
