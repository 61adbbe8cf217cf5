"""Contexts whose exact rows have 8 bits: what is stored, what is refused, and what becomes of what continues them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from index_store.cli.progress import LineReporter
from index_store.errors import ChecksumError, InvalidArgumentError, ManifestError
from index_store.family.children import publish_child, read_own_rows
from index_store.indexes.row_planes.stored import read_rows
from index_store.indexes.row_planes.two_planes import TwoPlanes
from index_store.memory.arena import Arena
from index_store.memory.context_loading import placed_bytes
from index_store.memory.placement import MemoryBytes, Placement, slot_bytes
from index_store.store.catalog import Store
from index_store.store.description.manifest import HIGH_PLANE, Manifest
from prefill_worker.config import AddIndexConfig, DetachConfig
from prefill_worker.jobs.added_indexes import run_add_index
from prefill_worker.jobs.children import run_detach
from tests.prefill_worker.jobs.support_jobs import MakeConfig, run
from tests.support.store import continuation


def reporter() -> LineReporter:
    return LineReporter(io.StringIO())


def rows_of(store: Store, manifest: Manifest) -> list[torch.Tensor]:
    with store.open(manifest.id) as context:
        return [read_rows(context, layer) for layer in range(manifest.model.layers)]


def steps_of(store: Store, manifest: Manifest, layer: int) -> torch.Tensor:
    """The coarse scales of keys, [H, N, d]."""
    scales = []
    with store.open(manifest.id) as context:
        for head in range(manifest.model.kv_heads):
            scales.append(context.array(f"index/{HIGH_PLANE}/key_scales", layer, head).float())
    return torch.stack(scales).repeat_interleave(128, dim=1)[:, : manifest.token_count]


@pytest.fixture
def pair(make_config: MakeConfig) -> tuple[Store, Manifest, Manifest]:
    """A context with rows as they are, and the same with rows in 8 bits."""
    plain = run(make_config(method=("refined",), centroids=None)).manifest
    coded = run(make_config(method=("refined",), centroids=None, rows="int8")).manifest
    return Store(make_config().store), plain, coded


def test_they_take_half_of_what_rows_take_with_a_coarse_copy(pair: tuple[Store, Manifest, Manifest]) -> None:
    store, plain, coded = pair
    assert plain.id != coded.id
    assert (plain.rows, coded.rows, coded.dtype) == ("dtype", "int8", "bfloat16")
    assert coded.kv_bytes * 4 == plain.kv_bytes
    assert coded.index(HIGH_PLANE) == plain.index(HIGH_PLANE)  # bit for bit, by their checksums
    assert store.verify(coded.id) == []
    taken = placed_bytes(coded, torch.device("cuda"), Placement.HYBRID)
    assert taken.host < placed_bytes(plain, torch.device("cuda"), Placement.HYBRID).host / 2
    assert coded.row_bytes * 4 == plain.row_bytes == 4 * coded.model.head_dim
    assert 0 < slot_bytes(coded) < slot_bytes(plain)
    for layer, (exact, found) in enumerate(zip(rows_of(store, plain), rows_of(store, coded), strict=True)):
        off = (found - exact.float()).abs()[:, :, 0]
        assert (off <= steps_of(store, coded, layer) * (1.0001 / 32) + 1e-6).all()
        assert off.any()


def test_in_memory_they_are_two_planes_of_which_one_is_the_index(
    pair: tuple[Store, Manifest, Manifest],
) -> None:
    store, _, coded = pair
    with Arena(MemoryBytes(host=2**30)).acquire(store, coded.id) as context:
        stored = rows_of(store, coded)
        for layer in range(coded.model.layers):
            rows = context.rows(layer)
            assert isinstance(rows, TwoPlanes)
            assert rows.dtype == torch.bfloat16
            assert torch.equal(rows.decode(0, coded.token_count), stored[layer])
            assert rows.coarse is context.index(HIGH_PLANE, layer).rows  # type: ignore[attr-defined]
            with pytest.raises(InvalidArgumentError, match="rows in 8 bits"):
                context.kv(layer)


def test_a_damaged_plane_is_found(pair: tuple[Store, Manifest, Manifest]) -> None:
    store, _, coded = pair
    chunk = max(
        (path for path in (store.path / "contexts" / coded.id / "kv").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    damaged = bytearray(chunk.read_bytes())
    damaged[3] ^= 16
    chunk.write_bytes(bytes(damaged))
    assert len(store.verify(coded.id)) == 1
    with pytest.raises(ChecksumError):
        rows_of(store, coded)


def test_any_method_brings_the_high_plane_and_indexes_may_be_added(make_config: MakeConfig) -> None:
    made = run(make_config(method=("pq",), centroids=None, rows="int8")).manifest
    assert made.methods == ("pq",)
    assert {"product_codes", HIGH_PLANE} <= made.stored_indexes
    store = make_config().store
    report = run_add_index(
        AddIndexConfig(context=made.id, store=store, method=("quest", "refined")), reporter()
    )
    assert dict(report.changed)["indexes"] == "added pages"
    again = run(make_config(method=("pq",), centroids=None, rows="int8"))
    assert (again.created, dict(again.changed)) == (False, {})


def test_what_cannot_be_is_refused(make_config: MakeConfig, pair: tuple[Store, Manifest, Manifest]) -> None:
    with pytest.raises(InvalidArgumentError, match="needs in its usual form"):
        run(make_config(index=(f"{HIGH_PLANE}:key_bits=3",), centroids=None, rows="int8"))
    with pytest.raises(InvalidArgumentError, match="--rows is 'int4'"):
        make_config(rows="int4")
    _, plain, coded = pair
    with pytest.raises(ManifestError, match="beside rows in 8 bits"):
        replace(coded, indexes=())
    high = coded.index(HIGH_PLANE)
    assert high is not None
    for name, value in (("key_bits", 3), ("value_group", 64)):
        other = replace(high, parameters={**high.parameters, name: value})
        with pytest.raises(ManifestError, match="in its usual form"):
            replace(coded, indexes=(other,))
    with pytest.raises(ManifestError, match="kv"):
        replace(coded, kv=plain.kv.layout, window=coded.kv)


def test_what_was_coded_is_not_taken_for_exact_rows(
    make_config: MakeConfig, tmp_path: Path, document: Path
) -> None:
    """A document that begins as a context in 8 bits does is computed; one in 8 bits takes exact rows."""
    longer = tmp_path / "longer.txt"
    longer.write_text(document.read_text() * 3)
    shared = {"method": ("full",), "centroids": None, "query_sample": 64}
    run(make_config(input=(longer,), rows="int8", **shared))
    longest = tmp_path / "longest.txt"
    longest.write_text(document.read_text() * 3 + "And then it rained. " * 30)
    plain = run(make_config(input=(longest,), **shared)).manifest
    assert "taken_tokens" not in plain.prefill
    coded = run(make_config(input=(longest,), rows="int8", **shared)).manifest
    assert coded.prefill["taken_from"] == plain.id


def test_a_child_keeps_its_rows_and_is_coded_when_it_is_made_whole(
    pair: tuple[Store, Manifest, Manifest],
) -> None:
    store, plain, coded = pair
    child = publish_child(store, continuation(store, coded, 40))
    assert (child.rows, child.dtype) == ("dtype", "bfloat16")
    own = read_own_rows(store, child).rows
    whole = run_detach(DetachConfig(context=child.id, store=store.path), reporter()).manifest
    assert (whole.id, whole.rows, whole.parent) == (child.id, "int8", None)
    assert store.verify(whole.id) == []
    exact, found = rows_of(store, plain), rows_of(store, whole)
    for layer in range(whole.model.layers):
        joined = torch.cat([exact[layer], own[layer]], dim=1).float()
        off = (found[layer] - joined).abs()[:, :, 0]
        # What is coded twice may be off twice, by steps that decoding may have made a sixteenth wider.
        assert (off <= steps_of(store, whole, layer) * (2.2 / 32) + 1e-6).all()
