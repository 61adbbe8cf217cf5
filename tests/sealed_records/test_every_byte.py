"""Every class of bytes of a context, of a job, and of both in an object store: flipped, it is found, named, not served.

One table says what is kept in which file. By day one byte of each class is flipped, and one of every file; by night
every byte.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from index_store.errors import ContextCorruptError, JobCorruptError, SparseKVError
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.job_record import JobOrder, JobRecord
from index_store.memory.arena import Arena
from index_store.objects.bucket import Bucket, BucketFile
from index_store.objects.context_file import (
    HEAD_BYTES,
    export_context,
    import_context,
    nowhere,
    read_contents,
    receive,
)
from index_store.objects.records import look, read_record
from index_store.store.catalog import Store
from index_store.store.files.durable import CHECKSUM_BYTES
from tests.index_store.objects.sites import Site
from tests.support.store import synthetic_context

JOB = "1" * 32
TOKENS = np.arange(9, dtype=np.uint32)


@dataclass(frozen=True)
class Kept:
    """Something that is at rest. files: of it. used: serves it, which raises where one byte is another one. looked: the
    errors that a command finds which looks at all of it; where none does, those of use."""

    files: Sequence[Path]
    used: Callable[[], object]
    error: type[SparseKVError]
    looked: Callable[[], Sequence[SparseKVError]] | None = None
    where: Callable[[Path], str] = str


def raised(use: Callable[[], object]) -> list[SparseKVError]:
    try:
        use()
    except SparseKVError as error:
        return [error]
    return []


def context_at_rest(folder: Path) -> Kept:
    store = Store(folder, create=True)
    context = synthetic_context(tokens=9)
    context.write(store)

    def load() -> None:
        arena = Arena(1 << 20)
        try:
            with store.open(context.id) as opened:
                opened.token_ids()
                for layer in range(context.draft.model.layers):
                    opened.queries(layer)
            with arena.acquire(store, context.id):
                pass
        finally:
            arena.clear()

    files = sorted(path for path in (folder / "contexts" / context.id).rglob("*") if path.is_file())
    return Kept(files, load, ContextCorruptError, lambda: store.verify(context.id))


def job_at_rest(folder: Path) -> Kept:
    Store(folder, create=True)
    queue = JobQueue(folder)
    talk = b'{"a": "conversation"}'
    order = JobOrder("a" * 64, "model", "model", "", "title", ("full",), "bfloat16", None, len(TOKENS),
                     conversation=hashlib.sha256(talk).hexdigest())  # fmt: skip
    queue.add(JobRecord(JOB, order, datetime(2026, 1, 1, tzinfo=UTC)), TOKENS, talk)

    def take() -> None:
        queue = JobQueue(folder)
        queue.get(JOB)
        with queue.claim() as claim:
            assert claim is not None
            claim.tokens()
            assert claim.conversation() == talk

    # Its tokens are sealed by the id of the context that they are to become, which the worker compares
    # (tests/prefill_worker/worker).
    files = [queue.folder(JOB) / name for name in ("job.json", "conversation")]
    return Kept(files, take, JobCorruptError)


def object_at_rest(folder: Path) -> Kept:
    """In a folder, as files whose bytes another one may change."""
    bucket = Bucket.open((folder / "bucket").as_uri())
    site = Site.at(folder / "store", bucket)
    context = synthetic_context(tokens=9)
    context.write(site.store)
    site.settle()
    files = sorted(path for path in (folder / "bucket").rglob("*") if path.is_file())

    def fetch() -> None:
        (held,) = look(bucket).values()
        manifest = read_record(bucket, context.id, held)
        assert manifest == context.manifest
        for key in held.contents:
            source = BucketFile(bucket, key)
            contents = read_contents(source)
            receive(source, contents.parts, nowhere, threads=1)

    return Kept(files, fetch, ContextCorruptError, where=lambda path: path.name)


def file_at_rest(folder: Path) -> Kept:
    """Of which nothing is in the store that refuses it."""
    store, other = (Store(folder / name, create=True) for name in ("store", "other"))
    context, path = synthetic_context(tokens=9), folder / "one.context"
    context.write(store)
    export_context(store, context.manifest, path)

    def bring() -> None:
        try:
            import_context(other, path)
            other.delete(context.id)
        finally:
            assert list((other.path / "contexts").iterdir()) == []

    return Kept([path], bring, ContextCorruptError)


KINDS: dict[str, Callable[[Path], Kept]] = {
    "context": context_at_rest,
    "job": job_at_rest,
    "object": object_at_rest,
    "file": file_at_rest,
}


def classes(path: Path, data: bytes) -> dict[str, range | list[int]]:
    """Positions of a file by what their bytes are."""
    if data[:1] == b"{":
        return {
            "line breaks": [at for at, byte in enumerate(data) if byte in b"\n "],
            "marks": [at for at, byte in enumerate(data) if byte in b'{}[],:"'],
            "digits": [at for at, byte in enumerate(data) if byte in b"0123456789."],
            "letters": [at for at, byte in enumerate(data) if chr(byte).isalpha()],
        }
    found: dict[str, range | list[int]] = {
        "first": range(1),
        "contents": range(len(data) - CHECKSUM_BYTES),
        "last": range(len(data) - CHECKSUM_BYTES, len(data)),
    }
    if path.suffix == ".context":
        found["head"] = range(HEAD_BYTES)
        found["manifest"] = range(HEAD_BYTES, HEAD_BYTES + int.from_bytes(data[12:16], "little"))
    return found


def check(kept: Kept, path: Path, data: bytes, at: int, bit: int) -> None:
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    path.write_bytes(changed)
    try:
        for errors in (raised(kept.used), *([] if kept.looked is None else [kept.looked()])):
            assert errors, f"bit {bit} of byte {at} of {path} is another one, and nobody says so"
            assert isinstance(errors[0], kept.error), (path, at, bit, errors)
            assert kept.where(path) in errors[0].message, (path, at, bit, errors)
    finally:
        path.write_bytes(data)


def some(kept: Kept) -> Iterator[tuple[Path, bytes, int]]:
    for path in kept.files:
        data = path.read_bytes()
        for name, positions in classes(path, data).items():
            if positions:
                yield path, data, random.Random(f"{path.name} {name}").choice(positions)


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_of_every_class(kind: str, tmp_path: Path) -> None:
    kept = KINDS[kind](tmp_path)
    kept.used()
    for number, (path, data, at) in enumerate(some(kept)):
        check(kept, path, data, at, number % 8)
    kept.used()


@pytest.mark.nightly
@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte(kind: str, quarter: int, tmp_path: Path) -> None:
    kept = KINDS[kind](tmp_path)
    for path in kept.files:
        data = path.read_bytes()
        for at in range(quarter, len(data), 4):
            check(kept, path, data, at, (at + len(path.name)) % 8)
    kept.used()
