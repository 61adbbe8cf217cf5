"""Whatever is in a sealed file is accepted or refused in a sentence; files of before are read and written the same."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from index_store.errors import SparseKVError
from index_store.store.catalog import Store
from index_store.store.description.json_fields import Sealed, render_document
from prefill_worker.build.checkpoint import Checkpoint, parse_record
from tests.sealed_records.records import CONTEXT, KINDS, LAYER, RECORDED, json_files, use, write_context
from tests.support.store import other_model

WHERE = "a folder/record.json"
ONE_OF_EACH: dict[str, tuple[Sealed[Any], Any]] = {
    name: KINDS[name]
    for name in (
        *("manifest-windowed", "manifest-owned", "job-held", "default-keep", "tokens", "tokens-owned"),
        "checkpoint",
    )
}
of_every_kind = pytest.mark.parametrize("kind", ONE_OF_EACH)


def document(kind: str) -> dict[str, Any]:
    """The JSON of a record, without its checksum."""
    sealed, record = ONE_OF_EACH[kind]
    found: dict[str, Any] = json.loads(sealed.render(record))
    del found["checksum"]
    return found


def places(found: object, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document: its fields, what is in them, and fields that are not there."""
    items: list[tuple[Any, Any]] = []
    if isinstance(found, dict):
        items = [*found.items(), ("surprise \ud800", None)]
    elif isinstance(found, list):
        items = [(0, found[0])] if found else []
    for name, value in items:
        yield (*prefix, name)
        yield from places(value, (*prefix, name))


@contextmanager
def refused(kind: str, error: str, said: str | None = None) -> Iterator[None]:
    """The block raises this error of the kind, whose sentence names the file and says what to do."""
    sealed = ONE_OF_EACH[kind][0]
    with pytest.raises(getattr(sealed, error), match=said) as caught:
        yield
    assert caught.value.message.startswith(f"{WHERE}: ")
    assert caught.value.message.endswith(f"{sealed.repair}")
    assert caught.value.metadata["path"] == WHERE


NOT_JSON: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-20],
    "no text": lambda data: b"\xff" + data,
    "no object": lambda data: b"[1]",
    "nothing": lambda data: b"null",
    "deep": lambda data: b"[" * 100_000,
    "long number": lambda data: b"1" * 5_000,
    "infinite": lambda data: b'{"format_version": 2e999}',
    "not a number": lambda data: data.replace(b'"format_version"', b'"a": NaN,\n "format_version"'),
    "half a letter": lambda data: b"\xed\xa0\x80",
}


@of_every_kind
@pytest.mark.parametrize("damage", NOT_JSON)
def test_what_is_no_json_object_is_refused(kind: str, damage: str) -> None:
    sealed, record = ONE_OF_EACH[kind]
    with refused(kind, "wrong"):
        sealed.parse(NOT_JSON[damage](sealed.render(record)), WHERE)


ALTERED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "white space": (lambda data: data.replace(b"\n", b" \n", 1), "not those that were written"),
    "end": (lambda data: data[:-1], "not those that were written"),
    "doubled": (
        lambda data: data.replace(b'"format_version"', b'"format_version": 0,\n "format_version"'),
        "not those that were written",
    ),
    "checksum": (lambda data: altered(data, "checksum", "00000000"), "has crc32c|have crc32c"),
    "no checksum": (lambda data: altered(data, "checksum", None), "no field 'checksum'"),
    "contents": (lambda data: altered(data, "surprise", 1), "its contents have crc32c"),
}


def altered(data: bytes, name: str, value: object) -> bytes:
    """With another value of a field, and the checksum that it had."""
    found = json.loads(data) | {name: value}
    if value is None:
        del found[name]
    return json.dumps(found, indent=1, sort_keys=True).encode() + b"\n"


@of_every_kind
@pytest.mark.parametrize("damage", ALTERED)
def test_what_was_altered_is_refused(kind: str, damage: str) -> None:
    sealed, record = ONE_OF_EACH[kind]
    change, said = ALTERED[damage]
    with refused(kind, "damaged", said):
        sealed.parse(change(sealed.render(record)), WHERE)


@of_every_kind
def test_other_versions_are_told_apart(kind: str) -> None:
    sealed, _ = ONE_OF_EACH[kind]
    newer = document(kind) | {"format_version": sealed.versions[-1] + 1, "something_new": [1]}
    for data in (render_document(newer), json.dumps(newer).encode()):  # whatever seal that version has
        with refused(
            kind, "foreign", f"format version {sealed.versions[-1] + 1}, this program.*update sparsekv"
        ):
            sealed.parse(data, WHERE)
    older = document(kind) | {"format_version": sealed.versions[0] - 1}
    with refused(kind, "foreign", "made by an older sparsekv"):
        sealed.parse(render_document(older), WHERE)
    with refused(kind, "wrong", f"'format_version' is 'new', expected {sealed.versions[-1]}"):
        sealed.parse(render_document(document(kind) | {"format_version": "new"}), WHERE)


LEFT_OUT = {
    "window",
    "query_positions",
    "parent",
    "owner",
    "labels",
    "whole",
    "rows",
    "moves",
    "furthest",
} | {
    "tenant",
    "readers",
    "rights",
    "expires_at",
}
"""Fields that a file need not have, and one that decides what another must be."""

NAMED_AT_WILL = {"prefill", "seconds", "reached", "labels", "parameters"}
"""Fields whose value has names that no format knows."""


@of_every_kind
def test_every_missing_or_unknown_field_is_named(kind: str) -> None:
    sealed, _ = ONE_OF_EACH[kind]
    for place in places(document(kind)):
        changed = document(kind)
        holder: Any = changed
        for step in place[:-1]:
            holder = holder[step]
        name = place[-1]
        if not isinstance(holder, dict) or name in LEFT_OUT or NAMED_AT_WILL & set(place[:-1]):
            continue
        if name in holder:
            del holder[name]
            said = rf"{name}' is (missing|None)"
        else:
            holder["surprise"] = 1
            said = "surprise' is 1, expected no such field"
        with refused(kind, "wrong", said):
            sealed.parse(render_document(changed), WHERE)


@of_every_kind
def test_any_json_value_in_any_field(kind: str) -> None:
    """What is accepted is written again; what is refused is refused in a sentence that can be sent and shown.

    Other values in several fields at once: `tests/fuzz`.
    """
    sealed, _ = ONE_OF_EACH[kind]
    odd = (10**400, 10**25, "\ud800", None, "0001-01-01T00:00:00+00:00")
    for place, value in itertools.product(places(document(kind)), odd):
        changed = document(kind)
        holder: Any = changed
        for step in place[:-1]:
            holder = holder[step]
        holder[place[-1]] = value
        contents = render_document(json.loads(json.dumps(changed)))
        read: Any = None
        refusals: list[SparseKVError] = []
        try:
            read = sealed.parse(contents, WHERE)
        except (sealed.wrong, sealed.damaged, sealed.foreign) as error:
            refusals.append(error)
        for refusal in refusals:
            assert refusal.message.startswith(WHERE)
            assert len(refusal.message) < 2_000
            "".join([refusal.message, *refusal.metadata.values()]).encode()
        if not refusals:
            assert sealed.parse(sealed.render(read), WHERE).__class__ is sealed.kind
            use(read)


@pytest.mark.parametrize("name", KINDS)
def test_a_record_is_read_and_written_as_before(name: str) -> None:
    sealed, record = KINDS[name]
    recorded = (RECORDED / f"{name}.json").read_bytes()
    read = sealed.parse(recorded, name)
    assert read == record
    assert sealed.render(record) == sealed.render(read) == recorded


def test_a_layers_record_is_read_and_written_as_before() -> None:
    recorded = (RECORDED / "layer.json").read_text()
    read = parse_record(recorded, LAYER.tensors())
    assert read == LAYER
    assert LAYER.describe() == read.describe() == recorded


class OneLayer:
    """Stands in for a `Capture` of one layer, [1, 2, 2, 1]."""

    identity = other_model(layers=1)

    def __init__(self) -> None:
        self.kv = torch.zeros(1, 2, 2, 1)

    def rows(self, start: int, count: int) -> Iterator[tuple[Tensor, None]]:
        yield self.kv[:, start : start + count], None

    def state_tensors(self) -> dict[str, Tensor]:
        return {}

    def put_state(self, tensors: object, behind: int) -> None:
        pass

    def put_rows(self, start: int, count: int, parts: Sequence[tuple[Tensor, None]]) -> None:
        self.kv[:, start : start + count] = parts[0][0]


def test_a_checkpoint_is_read_and_written_as_before(tmp_path: Path) -> None:
    notes: list[str] = []
    names = ("checkpoint.json", "layer-1", "tokens-0")
    for folder in ("read", "written"):
        (tmp_path / folder).mkdir()
    for name in names:
        shutil.copy(RECORDED / name, tmp_path / "read")
    capture: Any = OneLayer()
    read = Checkpoint(tmp_path / "read", CONTEXT, notes.append)
    assert read.restore(capture) == 2
    assert notes == ["went on with a reading that had come to token 2"]
    assert capture.kv.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert read.records() == {1: LAYER}
    written = Checkpoint(tmp_path / "written", CONTEXT, notes.append)
    written.keep(capture, 0, 2)
    written.keep_layer(1, LAYER)
    assert sorted(path.name for path in (tmp_path / "written").iterdir()) == sorted(names)
    for name in names:
        assert (tmp_path / "written" / name).read_bytes() == (RECORDED / name).read_bytes()


def test_a_context_has_the_files_of_before(tmp_path: Path) -> None:
    """All JSON of a context by the names of its files: the manifest, and what zarr says of groups and arrays."""
    Store(tmp_path, create=True)
    write_context(tmp_path)
    assert json_files(tmp_path) == json.loads((RECORDED / "store.json").read_text())


FIRST_READ = """
import sys, threading
from index_store.store.description.manifest import MANIFESTS

sys.setswitchinterval(1e-6)
data, both = sys.stdin.buffer.read(), threading.Barrier(2)
read = lambda: (both.wait(), MANIFESTS.parse(data, "there"))
threads = [threading.Thread(target=read) for _ in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
"""


def test_two_threads_may_be_the_first_to_read() -> None:
    sealed, record = KINDS["manifest-windowed"]
    data = sealed.render(record)
    for _ in range(3):
        subprocess.run([sys.executable, "-c", FIRST_READ], input=data, check=True, timeout=60)
