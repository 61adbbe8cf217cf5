"""Manifests and ids of contexts: round trip, an error per way of being wrong, checks of model and dtype, versions.

What is wrong by its type alone is found as in every sealed file (`tests/sealed_records`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from index_store.errors import DtypeMismatchError, InvalidArgumentError, ManifestError, ModelMismatchError
from index_store.selection.budgets import KEEP_GRID
from index_store.store.description.array_entry import (
    ArrayEntry,
    conversation_entry,
    index_array_entry,
    kv_entry,
    queries_entry,
    tokens_entry,
    window_entry,
)
from index_store.store.description.context_id import ModelIdentity, WindowLayers, context_id
from index_store.store.description.json_fields import render_document
from index_store.store.description.manifest import (
    MANIFESTS,
    IndexEntry,
    Manifest,
    require_dtype,
    require_model,
)
from tests.support.store import MODEL, THRESHOLDS, SyntheticContext, other_model, synthetic_context

WHERE = "store/contexts/x/manifest.json"


def document(context: SyntheticContext) -> dict[str, Any]:
    """The manifest's JSON without its checksum, to be changed and sealed again."""
    parsed: dict[str, Any] = json.loads(MANIFESTS.render(context.manifest))
    del parsed["checksum"]
    return parsed


texts = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=20)
sizes = st.integers(1, 6)
scalars = st.one_of(
    texts | st.just(""),
    st.booleans(),
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
)
parameters = st.dictionaries(texts, scalars, max_size=4)
times = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))


@st.composite
def models(draw: st.DrawFn) -> ModelIdentity:
    kv_heads, layers = draw(sizes), draw(sizes)
    windows = st.sets(st.integers(0, layers - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    shape = st.tuples(windows, st.integers(1, 10**6), st.just(12), st.sampled_from([1, 2, 3]), sizes)
    return ModelIdentity(
        name=draw(texts),
        architecture=draw(texts),
        fingerprint=draw(texts),
        tokenizer_fingerprint=draw(texts),
        layers=layers,
        query_heads=kv_heads * draw(sizes),
        kv_heads=kv_heads,
        head_dim=draw(sizes),
        vocab_size=draw(st.integers(1, 10**6)),
        max_positions=draw(st.integers(10**6, 10**7)),
        window=draw(st.none() | shape.map(lambda values: WindowLayers(*values))),
    )


curves = st.lists(st.floats(0, 1, exclude_min=True), min_size=len(KEEP_GRID), max_size=len(KEEP_GRID)).map(
    lambda values: tuple(sorted(values, reverse=True))
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    model, tokens = draw(models()), draw(st.integers(1, 10**6))
    layers = st.sets(st.integers(0, model.layers - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    errors = st.tuples(*[st.floats(0, 1)] * model.layers)
    indexes = []
    for name in draw(st.sets(st.sampled_from(["tables", "codes-8", "a.b"]))):
        covered = draw(layers)
        arrays = tuple(
            index_array_entry(
                name, array, len(covered), (model.kv_heads, *draw(st.lists(sizes, max_size=3))), dtype
            )
            for array, dtype in draw(
                st.dictionaries(st.sampled_from(["rows", "scale"]), st.sampled_from(["int8", "float16"]))
            ).items()
        )
        thresholds = draw(curves | st.just(()))
        indexes.append(IndexEntry(name, draw(texts), draw(parameters), covered, arrays, thresholds))
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    positions = tuple(sorted(draw(st.lists(st.integers(0, 10**6), max_size=4 if model.full_layers else 0))))
    draft = Manifest(
        id=draw(st.from_regex(r"[0-9a-f]{64}", fullmatch=True)),
        name=draw(texts),
        created_at=draw(times),
        expires_at=draw(st.none() | times),
        model=model,
        dtype=dtype,
        token_count=tokens,
        methods=tuple(draw(st.lists(texts, min_size=1, max_size=3, unique=True))),
        dense_layers=draw(layers | st.just(())),
        selection_errors=draw(errors | st.just(())),
        tokens=tokens_entry(tokens),
        kv=kv_entry(model, tokens, dtype),
        window=window_entry(model, tokens, dtype),
        indexes=tuple(indexes),
        prefill=draw(parameters),
        seconds=draw(st.dictionaries(texts, st.floats(0, 1e9))),
        queries=queries_entry(model, len(positions)),
        query_positions=positions,
    )
    counts = {entry.path: len(list(entry.chunk_indices())) for entry in draft.arrays}
    return draft.with_checksums(
        {
            path: draw(st.binary(min_size=4 * count, max_size=4 * count)).hex()
            for path, count in counts.items()
        }
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    data = MANIFESTS.render(manifest)
    read = MANIFESTS.parse(data, WHERE)
    assert read == manifest
    assert MANIFESTS.render(read) == data
    scalars_read = [*read.prefill.values(), *(v for index in read.indexes for v in index.parameters.values())]
    scalars_kept = [*manifest.prefill.values(), *(v for i in manifest.indexes for v in i.parameters.values())]
    # 1, 1.0 and True are equal in Python but must stay what they are.
    assert sorted(map(repr, scalars_read)) == sorted(map(repr, scalars_kept))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layers": [2, 1]}, "layers"),
        ({"layers": [3]}, "layers"),
        ({"layers": []}, "layers"),
        ({"size": 0}, "size"),
        ({"kv_heads": 3}, "query_heads"),
    ],
)
def test_windows_that_do_not_fit_the_model_are_refused(
    context: SyntheticContext, changes: dict[str, object], field: str
) -> None:
    changed = document(context)
    window = {"layers": [1], "size": 8, "query_heads": 4, "kv_heads": 2, "head_dim": 8}
    changed["model"]["window"] = {**window, **changes}
    with pytest.raises(ManifestError, match=f"model.window.{field}"):
        MANIFESTS.parse(render_document(changed), WHERE)


def test_labels_pins_and_messages_survive_and_are_bounded(context: SyntheticContext) -> None:
    said = replace(conversation_entry(9), checksums="0" * 8)
    noted = replace(context.manifest, labels={"team": "law"}, pinned=True, conversation=said)
    assert MANIFESTS.parse(MANIFESTS.render(noted), WHERE) == noted
    before = document(context) | {"format_version": 3}
    assert not {"labels", "pinned", "conversation"} & set(before)
    assert MANIFESTS.parse(render_document(before), WHERE) == replace(context.manifest, format_version=3)
    for name, value, message in (
        ("labels", {"Team": "law"}, "'labels key' is 'Team'"),
        ("labels", {"team": "x" * 64}, "'labels.team'"),
        ("labels", {f"k{number}": "" for number in range(65)}, "65 labels"),
        ("pinned", 1, "'pinned' is 1, expected `bool`"),
        ("conversation", document(context)["tokens"], "'conversation'"),
    ):
        with pytest.raises(ManifestError, match=message):
            MANIFESTS.parse(render_document(document(context) | {name: value}), WHERE)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("name", "a\x1b[2Jb", r"'name' is .*expected 1-500 printable"),
        ("id", "../../etc", r"'id' is '../../etc', expected 64"),
        ("created_at", "2026-01-01T00:00:00", r"'created_at' .*a time in UTC"),
        ("dtype", "int8", r"'dtype' is 'int8', expected one of float32"),
        ("token_count", 36, r"'tokens' is .*37.*expected .*36"),
        ("token_count", 5000, r"'token_count' is 5000, expected at most 4096"),
        ("dense_layers", [3], r"'dense_layers' is \(3,\), expected ascending layers of 0..2"),
        ("dense_layers", [1, 0], r"'dense_layers'"),
        ("methods", [], r"'methods' is \(\), expected one or more different names"),
        ("methods", ["full", "full"], r"'methods' .*one or more different names"),
        ("methods", ["full", "a\nb"], r"'methods\[1\]' is .*printable"),
        (
            "selection_errors",
            [0.5, 0.1],
            r"'selection_errors' is .*expected 3 numbers, one per layer, or none",
        ),
        ("model.kv_heads", 3, r"'model.query_heads' is 4, expected a multiple of 3"),
        ("model.layers", 4, r"'kv' is .*expected .*4, 2"),
        ("model.head_dim", 0, r"'model.head_dim' is 0, expected an integer of 1 to"),
        ("kv.dtype", "float16", r"'kv' is"),
        ("kv.path", "../kv", r"'path' is '../kv'"),
        ("kv.chunks", [1, 1], r"'kv.chunks' is \(1, 1\), expected sizes that divide"),
        ("indexes.0.name", "a/b", r"'index.name' is 'a/b'"),
        ("indexes.0.layers", [0, 5], r"'indexes.tables.layers' is \(0, 5\)"),
        ("indexes.0.layers", [1], r"leading sizes \(1, 2\)"),
        ("indexes.0.arrays.0.path", "index/other/x", r"'path' is 'index/other/x'"),
        ("indexes.0.arrays.0.dtype", "complex64", r"dtype' is 'complex64', expected one of int8"),
        ("indexes.0.arrays.0.shape", [2, 2, 0, 37], r"shape' is \(2, 2, 0, 37\), expected .*positive"),
        ("indexes.0.arrays.0.chunks", [2, 1, 2, 37], r"expected one chunk per layer and KV head"),
        (
            "indexes.0.arrays.0.chunks",
            [2, 2, 4, 37],
            r"'index/tables/array_int8.checksums' is '4 checksums, .*expected 1 of 8",
        ),
        ("kv.checksums", "0" * 40, r"'kv.checksums' is '5 checksums, 0.*expected 6 of 8 .*hex digits"),
        ("kv.checksums", "0" * 56, r"'kv.checksums' is '7 checksums, 0.*expected 6 of 8"),
        ("kv.checksums", "0" * 47, r"'kv.checksums' is '5.875 checksums, 0.*expected 6 of 8"),
        ("kv.checksums", "A" * 48, r"'kv.checksums' is '6 checksums, A.*expected 6 of 8 lower-case hex"),
        ("kv.checksums", "0" * 47 + "\n", r"'kv.checksums' is '6 checksums, 0"),
        ("tokens.checksums", "", r"'tokens.checksums' is '0 checksums, ', expected 1 of 8"),
        ("indexes.0.thresholds", [0.5], r"'index.tables.thresholds' is \(0.5,\), expected 28 positive"),
        ("indexes.0.thresholds", THRESHOLDS[::-1], r"thresholds' is .*none above the one before"),
        ("indexes.0.thresholds", [*THRESHOLDS[:-1], 0], r"thresholds' is .*expected 28 positive"),
        ("queries", None, r"'queries' is None, expected ArrayEntry\(path='queries', shape=\(3, 2, 3, 2, 8\)"),
        ("queries.dtype", "float16", r"'queries' is .*float16.*expected .*float32"),
        ("queries.path", "kv", r"'queries' is .*path='kv'"),
        ("queries.checksums", "0" * 40, r"'queries.checksums' is '5 checksums"),
        ("query_positions", [], r"'queries' is .*expected None"),
        (
            "query_positions",
            [5, 4, 3],
            r"'query_positions' is \(5, 4, 3\), expected ascending token positions",
        ),
        ("query_positions", [-1, 4, 5], r"'query_positions' is \(-1, 4, 5\), expected ascending"),
        ("query_positions", [3, 4], r"'queries' is .*expected .*\(3, 2, 2, 2, 8\)"),
    ],
)
def test_bad_field(context: SyntheticContext, path: str, value: object, named: str) -> None:
    altered = document(context)
    place: Any = altered
    *steps, last = path.split(".")
    for step in steps:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    with pytest.raises(ManifestError, match=named) as caught:
        MANIFESTS.parse(render_document(altered), WHERE)
    assert caught.value.message.startswith(f"{WHERE}: ")
    assert caught.value.metadata["path"] == WHERE


def test_a_draft_is_not_rendered(context: SyntheticContext) -> None:
    with pytest.raises(ManifestError, match=r"'tokens.checksums' is None, expected a checksum per chunk"):
        MANIFESTS.render(context.draft)


def test_arrays_are_listed_once(context: SyntheticContext) -> None:
    index = context.manifest.indexes[0]
    with pytest.raises(ManifestError, match="every array once"):
        replace(context.manifest, indexes=(index, index))


def test_sizes(context: SyntheticContext) -> None:
    manifest = context.manifest
    assert manifest.kv_bytes == 3 * 2 * 37 * 2 * 8 * 2
    assert manifest.index_bytes == 2 * 2 * 37 * (4 * 1 + 5 * 2 + 6 * 4 + 7 * 4)
    assert manifest.bytes_per_token() * 37 == manifest.kv_bytes + manifest.index_bytes
    assert manifest.index("tables") is manifest.indexes[0]
    assert manifest.index("other") is None
    assert len(list(manifest.kv.chunk_indices())) == 3 * 2


def test_expiry() -> None:
    manifest = synthetic_context(ttl=timedelta(hours=1)).manifest
    assert not manifest.expired(manifest.created_at + timedelta(minutes=59))
    assert manifest.expired(manifest.created_at + timedelta(hours=1))
    assert not synthetic_context().manifest.expired(datetime(9999, 1, 1, tzinfo=UTC))


def test_require_model(context: SyntheticContext) -> None:
    require_model(context.manifest, MODEL)
    require_model(context.manifest, other_model(name="same weights, other folder"))
    with pytest.raises(ModelMismatchError, match=r"prefilled by toy .*aaaa.*expected other .*cccc") as caught:
        require_model(context.manifest, other_model(name="other", fingerprint="c" * 64))
    assert (caught.value.metadata["found"], caught.value.metadata["expected"]) == ("a" * 64, "c" * 64)
    with pytest.raises(ModelMismatchError, match="tokenizer fingerprint b"):
        require_model(context.manifest, other_model(tokenizer_fingerprint="d"))


def test_require_dtype(context: SyntheticContext) -> None:
    require_dtype(context.manifest, "bfloat16")
    with pytest.raises(DtypeMismatchError, match="as bfloat16, expected float16"):
        require_dtype(context.manifest, "float16")


def test_the_version_before(context: SyntheticContext) -> None:
    """Which had the salt in clear text; nothing but the version remains of it."""
    older = document(context) | {"format_version": 2, "salt": "owner\n7"}
    read = MANIFESTS.parse(render_document(older), WHERE)
    assert read == replace(context.manifest, format_version=2)
    assert MANIFESTS.render(read) == MANIFESTS.render(context.manifest)
    with pytest.raises(ManifestError, match="'salt' is None, expected a text"):
        MANIFESTS.parse(render_document(document(context) | {"format_version": 2}), WHERE)
    with pytest.raises(ManifestError, match="'salt' is 'owner', expected no such field"):
        MANIFESTS.parse(render_document(document(context) | {"salt": "owner"}), WHERE)


def test_context_id_follows_content_only() -> None:
    ids = [5, 6, 7]
    first = context_id(MODEL, "bfloat16", {"a": 1, "b": {"c": [2]}}, "", ids)
    assert len(first) == 64
    same = [
        context_id(MODEL, "bfloat16", {"b": {"c": [2]}, "a": 1}, "", ids),
        context_id(MODEL, "bfloat16", {"a": 1, "b": {"c": [2]}}, "", np.array(ids)),
        context_id(MODEL, "bfloat16", {"a": 1, "b": {"c": [2]}}, "", torch.tensor(ids)),
        context_id(other_model(name="renamed"), "bfloat16", {"a": 1, "b": {"c": [2]}}, "", ids),
    ]
    assert set(same) == {first}
    different = [
        context_id(other_model(fingerprint="c"), "bfloat16", {"a": 1, "b": {"c": [2]}}, "", ids),
        context_id(other_model(tokenizer_fingerprint="c"), "bfloat16", {"a": 1, "b": {"c": [2]}}, "", ids),
        context_id(MODEL, "float16", {"a": 1, "b": {"c": [2]}}, "", ids),
        context_id(MODEL, "bfloat16", {"a": 2, "b": {"c": [2]}}, "", ids),
        context_id(MODEL, "bfloat16", {"a": 1, "b": {"c": [2]}}, "salt", ids),
        context_id(MODEL, "bfloat16", {"a": 1, "b": {"c": [2]}}, "", [5, 6]),
        context_id(MODEL, "bfloat16", {"a": 1, "b": {"c": [2]}}, "", [5, 6, 8]),
    ]
    assert len({first, *different}) == 1 + len(different)


@pytest.mark.parametrize("tokens", [[], [-1], [1000], [1.5], [[1]]])
def test_context_id_refuses_bad_tokens(tokens: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="token ids"):
        context_id(MODEL, "bfloat16", {}, "", tokens)


def test_context_id_refuses_parameters_that_are_not_json() -> None:
    for value in (float("nan"), object()):
        with pytest.raises(InvalidArgumentError, match="options of the reading"):
            context_id(MODEL, "bfloat16", {"a": value}, "", [1])


def test_checksums_follow_the_chunks(context: SyntheticContext) -> None:
    kv = context.manifest.kv
    assert kv.layout == context.draft.kv
    assert kv.layout.checksums is None
    assert len(kv.checksums or "") == 8 * 3 * 2
    for layer, head, *_ in kv.chunk_indices():
        raw = context.kv[layer, head].view(torch.int16).numpy().tobytes()
        assert kv.checksum((layer, head)) == kv.checksum((layer, head, 0, 0, 0)) == google_crc32c.value(raw)
    assert kv.checksum((1,)) == kv.checksum((1, 0))
    assert MANIFESTS.parse(MANIFESTS.render(context.manifest), WHERE).kv.checksums == kv.checksums


@pytest.mark.parametrize("path", ["", "/kv", "a//b", "../x", "a/../b", "a/.hidden", "a\\b", "a b", "ä"])
def test_array_paths_stay_inside(path: str) -> None:
    with pytest.raises(ManifestError, match="'path'"):
        ArrayEntry(path, (1,), (1,), "int8")
