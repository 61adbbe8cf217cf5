"""Whatever JSON a stored file holds: it is accepted and can be used, or refused by name. It hides no other context."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from decode_engine.rpc.messages.describe import describe_context
from index_store.cli import report
from index_store.errors import (
    ContextCorruptError,
    ContextNotFoundError,
    FormatVersionError,
    ManifestError,
    SparseKVError,
)
from index_store.memory.context_loading import placed_bytes
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up
from index_store.store.description.manifest_json import parse_manifest, render_document, render_manifest
from index_store.store.listing import BrokenContext
from index_store.store.tuned_defaults import parse_default, render_default
from tests.index_store.store.test_tuned_defaults import record
from tests.support.serving.many_contexts import write_manifests
from tests.support.store import SyntheticContext, synthetic_context

WHERE = "store/contexts/x/manifest.json"
HUGE = 10**400

numbers = st.one_of(
    st.integers(),
    st.sampled_from([HUGE, -HUGE, 10**25, 2**63, 2**63 - 1, 2**31, 2**31 - 1, -1, 0, 1]),
    st.floats(),
)
texts = st.text() | st.sampled_from(
    ["", "\ud800", "a\x1b[2Jb", "0" * 64, "9999-12-31T23:59:59+00:00", "x" * 20_000]
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def paths(document: object, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document: its fields, what is in them, and fields that are not there."""
    items: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        items = [*document.items(), ("surprise \ud800", None)]
    elif isinstance(document, list):
        items = [(0, document[0])] if document else []
    for name, value in items:
        yield (*prefix, name)
        yield from paths(value, (*prefix, name))


DOCUMENT = {
    k: v for k, v in json.loads(render_manifest(synthetic_context().manifest)).items() if k != "checksum"
}
DEFAULT = {k: v for k, v in json.loads(render_default(record())).items() if k != "checksum"}


def altered(document: dict[str, Any], path: tuple[Any, ...], value: object) -> bytes:
    copied = json.loads(json.dumps(document))
    place: Any = copied
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    sealed = json.dumps(copied)  # what JSON cannot hold, it cannot be read from
    return render_document(json.loads(sealed))


def use(data: bytes) -> None:
    """Does with a manifest what listing, showing and describing it does."""
    manifest = parse_manifest(data, WHERE)
    assert parse_manifest(render_manifest(manifest), WHERE).id == manifest.id
    shown = {"summary": report.details(manifest, False, 0), "rows": report.detail_rows(manifest, False, 0)}
    json.dumps(shown, ensure_ascii=False, allow_nan=False).encode()
    report.list_row(manifest, False, 64)
    MessageToDict(describe_context(manifest, expired=False, resident=False))
    placed_bytes(manifest)


@contextmanager
def accepted_or_refused() -> Iterator[None]:
    """What is refused is refused by name, in a sentence that can be sent and shown."""
    refused: list[SparseKVError] = []
    try:
        yield
    except (ContextCorruptError, FormatVersionError) as error:
        refused.append(error)
    for error in refused:
        assert error.message.startswith(WHERE)
        assert len(error.message) < 2_000
        "".join([error.message, *error.metadata.values()]).encode()


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@example(("token_count",), HUGE)
@example(("token_count",), 10**25)
@example(("model", "max_positions"), HUGE)
@example(("seconds", "forward"), HUGE)
@example(("prefill", "chunk"), -HUGE)
@example(("format_version",), HUGE)
@example(("kv", "shape", 0), HUGE)
@example(("created_at",), "0001-01-01T00:00:00+00:00")
@given(st.sampled_from(list(paths(DOCUMENT))), values)
def test_any_json_value_in_any_field_of_a_manifest(path: tuple[Any, ...], value: object) -> None:
    try:
        data = altered(DOCUMENT, path, value)
    except ValueError:  # no JSON: NaN, infinities
        return
    with accepted_or_refused():
        use(data)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@example(("tokens",), HUGE)
@example(("keep",), HUGE)
@example(("wanted",), HUGE)
@given(st.sampled_from(list(paths(DEFAULT))), values)
def test_any_json_value_in_any_field_of_a_tuned_default(path: tuple[Any, ...], value: object) -> None:
    try:
        data = altered(DEFAULT, path, value)
    except ValueError:
        return
    with accepted_or_refused():
        default = parse_default(data, WHERE)
        manifest = synthetic_context().manifest
        MessageToDict(describe_context(manifest, default, expired=False, resident=False))


@pytest.mark.parametrize(
    "contents", [b"[" * 100_000, b"1" * 5_000, b'{"format_version": 2e999}', b"\xed\xa0\x80"]
)
def test_files_that_are_hardly_json(contents: bytes) -> None:
    with pytest.raises(ContextCorruptError, match=WHERE):
        parse_manifest(contents, WHERE)
    with pytest.raises(ContextCorruptError, match=WHERE):
        parse_default(contents, WHERE)


BAD: dict[str, bytes] = {
    "huge": render_document(DOCUMENT | {"token_count": HUGE}),
    "large": render_document(DOCUMENT | {"token_count": 10**25}),
    "seconds": render_document(DOCUMENT | {"seconds": {"forward": HUGE}}),
    "newer": render_document(DOCUMENT | {"format_version": 2**40}),
    "empty": b"",
    "deep": b"[" * 100_000,
}


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
    document = json.loads(render_manifest(context.manifest))
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
