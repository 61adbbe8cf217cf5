"""A store of contexts: round trips, listing, finding, opening."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from index_store.errors import (
    ContextAmbiguousError,
    ContextNotFoundError,
    InvalidArgumentError,
    ManifestError,
    StoreError,
)
from index_store.store.catalog import Store
from index_store.store.description.dtypes import STORED_DTYPES, dtype_name
from tests.support.store import CREATED, SyntheticContext, open_files, synthetic_context


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's elements as raw bytes: equality of these is bit-exact, NaN included."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def folder(store: Store, id_: str) -> Path:
    return store.path / "contexts" / id_


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_round_trip_is_bit_exact(store: Store, dtype: str) -> None:
    context = synthetic_context(dtype=dtype, index_dtypes=tuple(STORED_DTYPES))
    context.kv.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    context.write(store)
    with store.open(context.id) as opened:
        assert opened.manifest == context.manifest
        assert torch.equal(opened.tokens(), context.tokens)
        assert opened.tokens().dtype == torch.int64
        for layer in range(3):
            for head in range(2):
                found = opened.array("kv", layer, head)
                assert found.dtype == STORED_DTYPES[dtype].torch_dtype
                assert found.shape == (37, 2, 8)
                assert bits(found) == bits(context.kv[layer, head])
        for entry, data in context.entries():
            for row, layer in enumerate((1, 2)):
                for head in range(2):
                    found = opened.array(entry.path, layer, head)
                    assert dtype_name(found.dtype) == entry.dtype
                    assert bits(found) == bits(data[row, head])
        for layer in range(3):
            sample = opened.queries(layer)
            assert bits(sample.queries_HPGD) == bits(context.queries[layer])
            assert sample.positions_P.tolist() == list(context.draft.query_positions) == [36, 37, 38]
            assert bits(opened.array("queries", layer, 1)) == bits(context.queries[layer, 1])
    assert store.verify(context.id) == []


def test_a_context_without_a_sample_of_queries(store: Store) -> None:
    context = synthetic_context(query_rows=0)
    context.write(store)
    assert store.verify(context.id) == []
    with (
        store.open(context.id) as opened,
        pytest.raises(InvalidArgumentError, match="has no sample of queries"),
    ):
        opened.queries(0)


def test_all_zero_chunks_are_stored(store: Store) -> None:
    context = synthetic_context()
    context.kv.zero_()
    context.tokens.zero_()
    for data in context.arrays.values():
        data.zero_()
    context.write(store)
    assert store.verify(context.id) == []
    assert not store.open(context.id).array("kv", 2, 1).any()


def test_zarr_reads_what_was_written(stored: Store, context: SyntheticContext) -> None:
    group = zarr.open_group(folder(stored, context.id), mode="r")
    assert np.array_equal(group["tokens"][:], context.tokens.numpy())
    assert np.array_equal(group["kv"][:], context.kv.view(torch.uint16).numpy())
    assert group["kv"].attrs["dtype"] == "bfloat16"
    for entry, data in context.entries():
        assert np.array_equal(group[entry.path][:], data.numpy())


def test_mapped_array_is_private(stored: Store, context: SyntheticContext) -> None:
    opened = stored.open(context.id)
    opened.array("kv", 0, 0).zero_()
    assert bits(opened.array("kv", 0, 0)) == bits(context.kv[0, 0])
    assert stored.verify(context.id) == []


def test_mapping_holds_no_files_open(stored: Store, context: SyntheticContext) -> None:
    before = open_files(stored.path)
    opened = stored.open(context.id)
    for layer in range(3):
        opened.array("kv", layer, 0)
    assert open_files(stored.path) == before


@pytest.mark.parametrize(
    ("path", "layer", "head"),
    [
        ("kv", 3, 0),
        ("kv", -1, 0),
        ("kv", 0, 2),
        ("kv", 0, -1),
        ("index/tables/array_int8", 0, 0),
        ("queries", 3, 0),
        ("nothing", 0, 0),
    ],
)
def test_outside_of_arrays(
    stored: Store, context: SyntheticContext, path: str, layer: int, head: int
) -> None:
    with pytest.raises(InvalidArgumentError, match=path):
        stored.open(context.id).array(path, layer, head)


def test_closed_context(stored: Store, context: SyntheticContext) -> None:
    with stored.open(context.id) as opened:
        kept = opened.array("kv", 0, 0)
    with pytest.raises(InvalidArgumentError, match="closed"):
        opened.array("kv", 0, 0)
    assert bits(kept) == bits(context.kv[0, 0])


def test_list_is_newest_first(store: Store) -> None:
    old, new, middle = (
        synthetic_context(seed=seed, created=CREATED + timedelta(days=days))
        for seed, days in ((0, 0), (1, 9), (2, 5))
    )
    for context in (old, new, middle):
        context.write(store)
    assert store.list() == [new.manifest, middle.manifest, old.manifest]


def test_list_skips_what_is_not_a_context(stored: Store, context: SyntheticContext) -> None:
    contexts = stored.path / "contexts"
    (contexts / f".tmp-{context.id}-00").mkdir()
    (contexts / "notes").mkdir()
    (contexts / "file.txt").write_text("x")
    assert stored.list() == [context.manifest]


def test_manifest_in_the_wrong_folder(stored: Store, context: SyntheticContext) -> None:
    other = "0" * 64
    folder(stored, context.id).rename(folder(stored, other))
    with pytest.raises(ManifestError, match=f"'id' is '{context.id}', expected '{other}'"):
        stored.open(other)


def test_resolve(store: Store) -> None:
    first, second = synthetic_context(name="handbook"), synthetic_context(seed=1, name="code base, v2")
    for context in (first, second):
        context.write(store)
    for ref in (
        first.id,
        first.id.upper(),
        f"contexts/{first.id}",
        f"contexts/{first.id.upper()}",
        first.id[:6],
        first.id[:9].upper(),
        f"contexts/{first.id[:20]}",
        "handbook",
    ):
        assert store.resolve(ref) == first.id
    assert store.resolve("code base, v2") == second.id
    for ref in (first.id[:5], "0" * 64, "contexts/" + "0" * 64, "handboo", "", "contexts/", "000000"):
        with pytest.raises(ContextNotFoundError, match="no context"):
            store.resolve(ref)


def test_expired_contexts_do_not_make_a_name_ambiguous(store: Store) -> None:
    now = CREATED
    ticking = Store(store.path, clock=lambda: now)
    old, older = (synthetic_context(seed=seed, name="same", ttl=timedelta(hours=1)) for seed in (1, 2))
    for context in (old, older):
        context.write(ticking)
    live = synthetic_context(seed=3, name="same")
    live.write(ticking)
    with pytest.raises(ContextAmbiguousError, match="fits 3 contexts"):
        ticking.resolve("same")
    now += timedelta(hours=2)
    assert ticking.resolve("same") == live.id
    ticking.delete(live.id)
    with pytest.raises(ContextAmbiguousError, match="fits 2 contexts"):
        ticking.resolve("same")
    ticking.delete(older.id)
    assert ticking.resolve("same") == old.id  # which says that it has expired, rather than that there is none


def test_a_name_that_looks_like_an_id_is_found(store: Store) -> None:
    first, second = synthetic_context(name="F" * 64), synthetic_context(seed=1)
    first.write(store)
    second.write(store)
    assert store.resolve("F" * 64) == first.id
    third = synthetic_context(seed=2, name=second.id)
    third.write(store)
    assert store.resolve(second.id) == second.id  # an id means its context, whatever others are called
    store.delete(second.id)
    assert store.resolve(second.id) == third.id


def test_name_that_is_also_an_id_prefix(store: Store) -> None:
    first = synthetic_context()
    first.write(store)
    synthetic_context(seed=1, name=first.id[:8]).write(store)
    with pytest.raises(ContextAmbiguousError):
        store.resolve(first.id[:8])


@pytest.mark.parametrize(
    "ref",
    [
        "../outside",
        "..",
        ".",
        "/etc",
        "contexts/../../x",
        "a" * 63 + "/",
        "A" * 64,
        "g" * 64,
        "a" * 65,
        "a\0b",
    ],
)
def test_ids_never_leave_the_store(store: Store, tmp_path: Path, ref: str) -> None:
    (tmp_path / "outside").mkdir()
    with pytest.raises(ContextNotFoundError):
        store.resolve(ref)
    for use in (store.manifest, store.open, store.delete, store.verify, store.writer):
        with pytest.raises(InvalidArgumentError, match="64 lower-case hex digits"):
            use(ref)
    with pytest.raises(InvalidArgumentError), store.lock(ref):
        pytest.fail("locked a bad id")
    assert (tmp_path / "outside").exists()


def test_a_folder_that_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no store here .*prefill-worker run --store"):
        Store(tmp_path)
    with pytest.raises(StoreError, match="no store here"):
        Store(tmp_path / "missing")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError, match="creating the store failed"):
        Store(file, create=True)
    Store(tmp_path / "a" / "b", create=True)
    assert Store(tmp_path / "a" / "b").list() == []


@pytest.mark.parametrize("path", ["s3://bucket/x", Path("gs://bucket/x"), "file:///x"])
def test_a_url_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"store is '(s3|gs|file)://.*a URL; expected a path"):
        Store(path, create=True)
    assert list(tmp_path.iterdir()) == []


def test_reading_needs_no_lock_folder(stored: Store, context: SyntheticContext) -> None:
    (stored.path / "locks").rmdir()
    assert Store(stored.path).open(context.id).manifest == context.manifest
    with stored.lock(context.id):
        assert (stored.path / "locks" / context.id).exists()
    assert os.listdir(stored.path / "locks") == []


def test_unknown_context(store: Store) -> None:
    for use in (store.manifest, store.open, store.delete, store.verify):
        with pytest.raises(ContextNotFoundError, match="0000"):
            use("0" * 64)
