"""A context as one file: exported, imported, and whatever is wrong with it found and named."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest

from index_store.errors import (
    ChecksumError,
    ContextFileError,
    FormatVersionError,
    ParentMissingError,
    StoreFullError,
)
from index_store.family.children import publish_child
from index_store.objects import context_file
from index_store.objects.context_file import (
    HEAD_BYTES,
    export_context,
    file_bytes,
    import_context,
    nowhere,
    open_file,
    parts_of,
    read_contents,
    receive,
)
from index_store.store.catalog import Store
from index_store.store.zarr_io import chunk_path
from tests.index_store.cli.conftest import Command, command
from tests.support.store import SyntheticContext, add_index, continuation, raising, synthetic_context

__all__ = ["command"]  # a fixture


@pytest.fixture
def file(stored: Store, context: SyntheticContext, tmp_path: Path) -> Path:
    """The file of the context in `stored`."""
    path = tmp_path / "one.context"
    assert export_context(stored, stored.manifest(context.id), path) == path.stat().st_size
    return path


def assert_untouched(store: Store) -> None:
    """Nothing of a file that was refused is in the store."""
    assert store.entries() == []
    assert list((store.path / "contexts").iterdir()) == []


def test_a_context_comes_back_as_it_was(
    file: Path, store: Store, stored: Store, context: SyntheticContext
) -> None:
    assert file.stat().st_size == file_bytes(stored.manifest(context.id))
    assert import_context(store, file) == (stored.manifest(context.id), True)
    assert store.verify(context.id) == []
    before, after = (
        {path.relative_to(each.path): path.read_bytes() for path in each.path.rglob("*") if path.is_file()}
        for each in (stored, store)
    )
    assert before.keys() == after.keys()
    assert all(before[name] == after[name] for name in before if name.name != "zarr.json")
    assert import_context(store, file) == (stored.manifest(context.id), False)


def test_what_a_first_token_needs_comes_first(context: SyntheticContext) -> None:
    manifest = context.manifest
    parts = parts_of(manifest, 0)
    layer_of = {index.path: {0: 1, 1: 2} for index in manifest.indexes[0].arrays}
    places = [
        (layer_of.get(part.entry.path, {}).get(part.indices[0], part.indices[0]), part.entry.path)
        for part in parts[1:]
        if part.entry.path != "queries"
    ]
    assert parts[0].entry.path == "tokens"
    assert [layer for layer, _ in places] == sorted(layer for layer, _ in places)
    assert {part.entry.path for part in parts[-6:]} == {"queries"}
    assert len(parts) == sum(len([*entry.chunk_indices()]) for entry in manifest.arrays)
    assert all(a.start + a.nbytes == b.start for a, b in itertools.pairwise(parts))


def flipped(data: bytes, at: int, bit: int) -> bytes:
    """The bytes with one bit changed."""
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def test_every_length_but_its_own_is_refused(file: Path, store: Store) -> None:
    data, draws = file.read_bytes(), random.Random(1)
    cut = file.with_name("cut")
    for length in [
        0,
        1,
        7,
        8,
        HEAD_BYTES - 1,
        HEAD_BYTES,
        300,
        len(data) - 1,
        *draws.sample(range(len(data)), 20),
    ]:
        cut.write_bytes(data[:length])
        with pytest.raises(ContextFileError, match=r"begins with b|cut or damaged"):
            import_context(store, cut)
    cut.write_bytes(data + b"\0")
    with pytest.raises(ContextFileError, match=f"has {len(data) + 1} bytes, its beginning says {len(data)}"):
        import_context(store, cut)
    assert_untouched(store)


def resealed(data: bytes, change: Callable[[list[int]], None]) -> bytes:
    """The file with other numbers in its head, and the checksum of these."""
    magic, *numbers = struct.unpack_from("<8sIIQ", data)
    change(numbers)
    head = struct.pack("<8sIIQ", magic, *numbers)
    return head + google_crc32c.value(head).to_bytes(4, "little") + data[HEAD_BYTES:]


def test_foreign_files_are_refused_by_what_was_found(file: Path, store: Store, tmp_path: Path) -> None:
    data, foreign = file.read_bytes(), tmp_path / "foreign"
    foreign.write_bytes(b"PK\x03\x04 an archive of something else")
    with pytest.raises(ContextFileError, match=r"begins with b'PK.*expected b'SPARSEKV'"):
        import_context(store, foreign)
    with pytest.raises(ContextFileError, match="a folder instead of a file; expected one that"):
        import_context(store, tmp_path)

    def later(numbers: list[int]) -> None:
        numbers[0] = 2

    foreign.write_bytes(resealed(data, later))
    with pytest.raises(FormatVersionError, match="has version 2, this program reads version 1"):
        import_context(store, foreign)

    def huge(numbers: list[int]) -> None:
        numbers[1] = 2**32 - 1  # nothing of that size is asked for

    foreign.write_bytes(resealed(data, huge))
    with pytest.raises(ContextFileError, match="cut or damaged"):
        import_context(store, foreign)
    assert_untouched(store)


def test_a_child_needs_its_parent(
    stored: Store, store: Store, context: SyntheticContext, tmp_path: Path
) -> None:
    child = publish_child(stored, continuation(stored, context.id))
    export_context(stored, child, tmp_path / "child")
    with pytest.raises(
        ParentMissingError, match=f"continues context {context.id}, which is not in the store"
    ):
        import_context(store, tmp_path / "child")
    assert_untouched(store)
    export_context(stored, stored.manifest(context.id), tmp_path / "parent")
    import_context(store, tmp_path / "parent")
    assert import_context(store, tmp_path / "child") == (child, True)
    assert store.verify(child.id) == []
    assert [each.id for each in store.children(context.id)] == [child.id]


def test_a_context_with_added_indexes(
    stored: Store, store: Store, context: SyntheticContext, tmp_path: Path
) -> None:
    added, _ = add_index(stored, stored.manifest(context.id))
    export_context(stored, added, tmp_path / "more")
    assert import_context(store, tmp_path / "more") == (added, True)
    assert store.verify(added.id) == []


def test_a_damaged_context_is_not_exported(stored: Store, context: SyntheticContext, tmp_path: Path) -> None:
    path = chunk_path(stored.folders.context(context.id), context.manifest.kv, (1, 1))
    path.write_bytes(flipped(path.read_bytes(), 5, 3))
    target = tmp_path / "target"
    target.write_bytes(b"older")
    with pytest.raises(ChecksumError, match="array 'kv'"):
        export_context(stored, stored.manifest(context.id), target)
    assert target.read_bytes() == b"older"
    assert list(tmp_path.glob(".tmp-*")) == []


def test_a_damaged_context_is_replaced_by_an_import(
    file: Path, stored: Store, context: SyntheticContext
) -> None:
    path = chunk_path(stored.folders.context(context.id), context.manifest.kv, (1, 1))
    path.unlink()
    assert import_context(stored, file)[1]
    assert stored.verify(context.id) == []


def test_a_name_that_is_taken_gets_digits(file: Path, store: Store, context: SyntheticContext) -> None:
    synthetic_context(seed=5, name="handbook").write(store)
    imported, new = import_context(store, file)
    assert (imported.name, new) == (f"handbook {context.id[:6]}", True)


def test_large_and_small_parts_are_read_alike(
    file: Path, stored: Store, store: Store, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (64, 1000, 8 << 20):
        monkeypatch.setattr(context_file, "_RANGE_BYTES", size)
        monkeypatch.setattr(context_file, "_FIRST_READ", max(HEAD_BYTES, size))
        read: list[int] = []
        with open_file(file) as source:
            contents = read_contents(source)
            receive(source, contents.parts, nowhere, read.append)
        assert sum(read) == file.stat().st_size - contents.parts[0].start
        assert import_context(store, file)[1]
        assert store.verify(context.id) == []
        store.delete(context.id)


class Spoiled:
    """A source that hands out wrong bytes for a while."""

    def __init__(self, source: context_file.LocalFile, times: int) -> None:
        self._source, self._times = source, times
        self.where, self.size = source.where, source.size

    def read(self, start: int, count: int) -> bytes:
        data = self._source.read(start, count)
        if start == 0 or self._times == 0:
            return data
        self._times -= 1
        return flipped(data, count // 2, 0)


def test_what_is_spoiled_on_the_way_is_read_again(file: Path) -> None:
    with open_file(file) as source:
        contents = read_contents(source)
        receive(Spoiled(source, 2), contents.parts, nowhere, threads=1)
        with pytest.raises(ChecksumError, match=r"array '.*the file was altered or damaged"):
            receive(Spoiled(source, 3), contents.parts, nowhere, threads=1)


def test_a_full_disk_leaves_nothing(file: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "index_store.store.writer.ArrayFiles.write_part", raising(OSError(28, "No space left on device"))
    )
    with pytest.raises(StoreFullError):
        import_context(store, file)
    assert_untouched(store)


def test_the_commands(command: Command, context: SyntheticContext, tmp_path: Path) -> None:
    store, path = command.store, tmp_path / "out"
    child = publish_child(store, continuation(store, context.id))
    told = command.json("export", child.id, str(path), "--with-parents")["exported"]
    assert [each["id"] for each in told] == [context.id, child.id]
    assert [each["parent"] for each in told] == [None, context.id]
    code, out, err = command.run("export", "child", str(path))
    assert (code, out.startswith(child.id)) == (0, True)
    assert f"it continues {context.id}" in err
    other = Command(Store(tmp_path / "other", create=True), command._capture)
    assert other.ok("import", f"{path}.parent", str(path)) == f"{context.id}: handbook\n{child.id}: child\n"
    assert other.ok("import", str(path)) == f"{child.id}: child (was there already)\n"
    assert "begins with" in other.fails(
        "import", str(tmp_path / "other" / "contexts" / child.id / "manifest.json")
    )
    assert other.ok("verify").count(": ok") == 2
    assert replace(other.store.manifest(child.id)) == child
