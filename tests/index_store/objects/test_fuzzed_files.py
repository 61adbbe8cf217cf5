"""Files of contexts and records with anything in them: an error of ours that names the file, or what was written."""

from __future__ import annotations

import struct
from functools import cache

import google_crc32c
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from index_store.errors import ContextCorruptError, FormatVersionError, SparseKVError
from index_store.objects.context_file import HEAD_BYTES, nowhere, packed, read_contents, receive
from index_store.objects.records import Held, read_record
from index_store.store.catalog import Store
from index_store.store.description.manifest import MANIFESTS, Manifest
from tests.index_store.objects.sites import memory_bucket
from tests.support.store import synthetic_context

SHORT, LONG = 150, 3_000
EDITS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=9)), max_size=4)


class Memory:
    """Bytes as a source."""

    where = "a file"

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, start: int, count: int) -> bytes:
        return self._data[start : start + count]


@cache
def written() -> bytes:
    """The file of a small context."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"{folder}/store", create=True)
        context = synthetic_context(tokens=9)
        context.write(store)
        return b"".join(packed(store, store.manifest(context.id)))


def edited(data: bytes, edits: list[tuple[float, bytes]], length: float, *, seal: bool) -> bytes:
    """The bytes with some replaced, cut; seal: the head's checksum is right all the same."""
    found = bytearray(data)
    for place, news in edits:
        at = int(place * len(found))
        found[at : at + len(news)] = news
    if seal and len(found) >= HEAD_BYTES:
        struct.pack_into("<I", found, HEAD_BYTES - 4, google_crc32c.value(bytes(found[: HEAD_BYTES - 4])))
    return bytes(found[: round(length * len(found))])


def read(data: bytes) -> bool:
    """Whether a file is whole. Whatever it is, no other error comes."""
    try:
        contents = read_contents(Memory(data))
        receive(Memory(data), contents.parts, nowhere, threads=1)
    except (ContextCorruptError, FormatVersionError) as error:
        said = error.message
    else:
        return True
    assert "a file" in said
    return False


def check_edited(edits: list[tuple[float, bytes]], length: float, seal: bool) -> None:
    data = edited(written(), edits, length, seal=seal)
    assert read(data) == (data == written())


def check_head(numbers: tuple[int, int, int], rest: bytes) -> None:
    """Numbers of any size ask for no memory."""
    head = struct.pack("<8sIIQ", b"SPARSEKV", *numbers)
    assert not read(head + google_crc32c.value(head).to_bytes(4, "little") + rest)


def check_record(edits: list[tuple[float, bytes]], length: float) -> None:
    manifest, bucket = synthetic_context(tokens=9).manifest, memory_bucket()
    data = MANIFESTS.render(manifest)
    news = edited(data, edits, length, seal=False)
    bucket.put_new("contexts/record", news)
    found: Manifest | None
    try:
        found = read_record(bucket, manifest.id, Held(1, key="contexts/record"))
    except SparseKVError as error:
        found, said = None, error.message
    else:
        said = "contexts/record"
    assert "contexts/record" in said
    assert found == (manifest if news == data else None)


SHARES = st.one_of(st.just(1.0), st.floats(0, 1))
SIZES = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
CASES = {
    "edited": (check_edited, (EDITS, SHARES, st.booleans())),
    "head": (check_head, (SIZES, st.binary(max_size=200))),
    "record": (check_record, (EDITS, SHARES)),
}


def try_out(name: str, count: int) -> None:
    check, drawn = CASES[name]
    wrapped = given(*drawn)(check)
    settings(max_examples=count, deadline=None, suppress_health_check=[*HealthCheck])(wrapped)()


@pytest.mark.parametrize("name", CASES)
def test_some(name: str) -> None:
    try_out(name, SHORT)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_many(name: str) -> None:
    try_out(name, LONG)
