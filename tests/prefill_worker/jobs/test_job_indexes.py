"""Which indexes a job stores, in which layers, how they are calibrated, added later, and rows in 8 bits."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from index_store.cli.console import LineReporter
from index_store.errors import (
    ContextNotFoundError,
    InvalidArgumentError,
    ManifestError,
    MethodUnsupportedError,
    StoreFullError,
)
from index_store.family.children import publish_child, read_own_rows
from index_store.indexes.coarse_rows.two_planes import TwoPlanes, read_rows
from index_store.indexes.interface.layer_index import LayerIndex
from index_store.memory.arena import Arena
from index_store.memory.context_loading import placed_bytes
from index_store.memory.placement import MemoryBytes, Placement, slot_bytes
from index_store.methods.presets import get_method
from index_store.models.loading import load_model, load_tokenizer, resolve_model
from index_store.selection.budgets import Threshold, ThresholdCurve
from index_store.selection.cutting import cut
from index_store.store.catalog import Store
from index_store.store.description.manifest import HIGH_PLANE, IndexEntry, Manifest
from index_store.store.stored_context import QuerySample
from index_store.store.writer import ContextWriter
from prefill_worker.config import AddIndexConfig, DetachConfig
from prefill_worker.jobs import document_layers
from prefill_worker.jobs.added_indexes import run_add_index
from prefill_worker.jobs.children import run_detach
from prefill_worker.jobs.job import run_job
from prefill_worker.jobs.prepared_job import PrefillReport
from prefill_worker.reading.capture import Capture, register_attention
from prefill_worker.reading.prefill import run_context
from prefill_worker.reading.query_sample import plan_sample
from tests.prefill_worker.conftest import DOCUMENT, MakeConfig, hidden_entries, run
from tests.support.models import write_model_folder
from tests.support.search import step
from tests.support.store import continuation, raising


def test_several_methods_share_a_context(make_config: MakeConfig) -> None:
    config = make_config(method=("csattention", "csattention-paper", "oracle"), dense_layers="1")
    manifest = run(config).manifest
    assert manifest.methods == ("csattention", "csattention-paper", "oracle")
    assert {index.name: index.layers for index in manifest.indexes} == {
        "query_tables": (0, 1),
        "remainder_clusters": (0, 1),
        "paper_tables": (0, 1),
    }
    assert manifest.dense_layers == (1,)
    assert manifest.selection_errors == ()


def test_as_many_centroids_as_sampled_queries_and_no_more(make_config: MakeConfig) -> None:
    """17 positions, each with the queries of two heads to a KV head."""
    most = make_config(method=("csattention",), input=(Path("-"),), index=("query_tables:centroids=34",))
    assert run(most, b"x" * 17).manifest.indexes[0].parameters["centroids"] == 34
    with pytest.raises(
        InvalidArgumentError, match="--index query_tables has 35 centroids, expected at most 34"
    ):
        run(replace(most, index=("query_tables:centroids=35",)), b"x" * 17)
    assert run(replace(most, index=()), b"x").created  # the method's own number


def test_indexes_with_clusters_are_calibrated(make_config: MakeConfig) -> None:
    config = make_config(method=("squeezed", "squeezed-tree", "quest"))
    manifest = run(config).manifest
    curves = {index.name: index.thresholds for index in manifest.indexes}
    assert curves["pages"] == ()
    store = Store(config.store)
    with Arena(1 << 24).acquire(store, manifest.id) as resident, store.open(manifest.id) as context:
        for name in ("key_clusters", "cluster_tree"):
            curve = ThresholdCurve(curves[name])
            shares = [
                kept_share(resident.index(name, layer), context.queries(layer), curve) for layer in (0, 1)
            ]
            # Calibrated on other keys than these queries see: without their own neighbourhood.
            assert 0.05 < sum(shares) / 2 < 0.15


def kept_share(index: LayerIndex, sample: QuerySample, curve: ThresholdCurve) -> float:
    """Share of the keys after the sinks that the last 64 queries keep when a tenth is wanted."""
    count, sinks = len(DOCUMENT), 8
    shares = []
    for row in range(len(sample.positions_P) - 64, len(sample.positions_P)):
        queries = sample.queries_HPGD[:, row : row + 1] * 16**-0.5
        ranking = index.rank(queries, sinks, count, None, {}, position=int(sample.positions_P[row]))
        kept = cut(Threshold(keep=0.1), ranking, replace(step(count), thresholds=curve))
        shares.append(float(kept.counts_HT.float().mean()) / (count - sinks))
    return sum(shares) / len(shares)


def test_the_stored_queries_are_those_of_the_capture(make_config: MakeConfig, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Where does the harbour lie?\n")
    config = make_config(calibration=prompts, device="cpu")
    manifest = run(config).manifest
    count = manifest.token_count
    positions = manifest.query_positions
    assert len(positions) == 128
    assert set(range(count - 64, count)) <= set(positions)
    assert positions[0] == 0
    assert positions[-1] >= count
    folder = resolve_model(config.model)
    ids = load_tokenizer(folder).encode(DOCUMENT)
    loaded = load_model(folder, register_attention())
    capture = Capture(loaded.identity, count, torch.bfloat16, plan_sample(count, [], count, 0))
    run_context(loaded.model, capture, ids, 100)
    inside = torch.tensor([position for position in positions if position < count])
    with Store(config.store).open(manifest.id) as context:
        for layer in (0, 1):
            stored = context.queries(layer)
            assert stored.positions_P.tolist() == list(positions)
            expected = capture.query_sample(layer).queries_HPGD[:, inside]
            torch.testing.assert_close(stored.queries_HPGD[:, : len(inside)], expected, rtol=1e-3, atol=1e-3)


def test_windowed_rope_needs_an_embedding_that_can_be_undone(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "glm", "glm")
    config = make_config(model=str(folder), method=("squeezed",), index=("key_clusters:window=64",))
    with pytest.raises(
        InvalidArgumentError, match="turned otherwise, or not in all layers; build the index with window 0"
    ):
        run(config)
    assert hidden_entries(config.store) == []
    windowed = run(make_config(method=("squeezed",), index=("key_clusters:window=64",)))
    assert windowed.manifest.indexes[0].parameters["window"] == 64
    assert len(windowed.manifest.indexes[0].thresholds) == 28


def test_every_layer_may_be_dense(make_config: MakeConfig) -> None:
    config = make_config(method=("csattention-paper",), dense_layers="0,1")
    manifest = run(config).manifest
    assert manifest.dense_layers == (0, 1)
    assert [index.layers for index in manifest.indexes] == [(0, 1)]
    assert get_method("csattention-paper").on(manifest).searching == frozenset()


def test_the_automatic_rule_is_recorded(make_config: MakeConfig) -> None:
    manifest = run(make_config(dense_layers="auto")).manifest
    errors = manifest.selection_errors
    assert len(errors) == 2
    assert manifest.dense_layers == tuple(layer for layer, error in enumerate(errors) if error > 0.1)


def refuse_model(*_: object, **__: object) -> None:
    pytest.fail("the weights were loaded although keys and values are stored")


def refuse_reading(*_: object, **__: object) -> None:
    pytest.fail("the document was read although keys and values are stored")


def rows(store: Path, id_: str) -> dict[str, tuple[int, int]]:
    """Inode and time of the last change of every file of tokens, keys, values and queries."""
    folder = store / "contexts" / id_
    files = [path for name in ("tokens", "kv", "queries") for path in (folder / name).rglob("*")]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files if path.is_file()}


def checksums(manifest: Manifest, name: str) -> dict[str, str | None]:
    index = manifest.index(name)
    return {array.path: array.checksums for array in index.arrays}


def thresholds(manifest: Manifest, name: str) -> tuple[float, ...]:
    entry = manifest.index(name)
    assert isinstance(entry, IndexEntry)
    return entry.thresholds


def test_an_index_of_keys_is_added_without_reading_again(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(make_config().store, create=True)
    methods = ("csattention", "quest", "squeezed", "multipole-tree", "refined")
    whole = run(make_config(method=methods, salt="at once")).manifest
    first = run(make_config(method=("csattention",))).manifest
    before = rows(store.path, first.id)
    with store.open(first.id) as reader:  # has the context open all the time
        monkeypatch.setattr(document_layers, "load_model", refuse_model)
        report = run(make_config(method=("quest",)))
        assert report.manifest.id == first.id
        assert not report.created
        assert dict(report.changed) == {
            "indexes": "added pages",
            "methods": "now csattention, quest",
        }
        run(make_config(method=("squeezed", "multipole-tree", "refined")))
        assert reader.manifest == first
        tables = first.indexes[0].arrays[0].path
        head = torch.empty(first.indexes[0].arrays[0].shape[2:], dtype=reader.array(tables, 0, 0).dtype)
        reader.read_head(tables, 0, 0, head)
    stored = store.manifest(first.id)
    assert store.verify(first.id) == []
    assert rows(store.path, first.id) == before
    assert stored.methods == methods
    for name in ("pages", "key_clusters", "cluster_tree", "query_tables", "coarse_rows"):
        assert checksums(stored, name) == checksums(whole, name)
    for name in methods:
        assert get_method(name).on(stored).manifest == stored
    for name in ("key_clusters", "cluster_tree", "coarse_rows"):
        assert len(thresholds(stored, name)) == 28
        # of the 64 last queries, which are stored, instead of the 100 last; one in 16 where single keys are ranked
        pairs = zip(thresholds(stored, name), thresholds(whole, name), strict=True)
        close = 0.6 if name == "coarse_rows" else 0.3
        assert all(found == pytest.approx(expected, rel=close) for found, expected in pairs)
    assert not run(make_config(method=methods)).changed
    assert {manifest.id for manifest in store.list()} == {whole.id, first.id}
    assert hidden_entries(store.path) == []


@pytest.mark.parametrize("reading", ["plain", "calibrated", "muse"])
def test_query_tables_are_added_by_reading_again(
    make_config: MakeConfig, tmp_path: Path, reading: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Where does the harbour lie?\nHow was the night?\n")
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "calibrated": {"calibration": prompts},
        "muse": {"attention": "muse", "muse_block": 256},
    }
    config = {**options[reading], "device": "cpu"}
    whole = run(make_config(method=("csattention",), salt="at once", **config)).manifest
    first = run(make_config(method=("quest",), **config)).manifest
    store = Store(make_config().store)
    before = rows(store.path, first.id)
    report = run(make_config(method=("csattention",), **config))
    assert report.manifest.id == first.id
    assert report.changed["indexes"] == "added query_tables, remainder_clusters"
    assert "prefill" in report.seconds
    assert rows(store.path, first.id) == before
    for name in ("query_tables", "remainder_clusters"):
        assert checksums(report.manifest, name) == checksums(whole, name)
    assert store.verify(first.id) == []
    assert store.manifest(first.id) == report.manifest


def test_an_index_in_another_form_is_refused(make_config: MakeConfig) -> None:
    first = run(make_config(method=("csattention",), index=("query_tables:centroids=8",))).manifest
    with pytest.raises(
        InvalidArgumentError,
        match=r"has index query_tables with centroids=8, asked for is centroids=4; .*--salt, or delete",
    ):
        run(make_config(method=("csattention",), index=("query_tables:centroids=4",)))
    assert Store(make_config().store).manifest(first.id) == first
    with pytest.raises(
        InvalidArgumentError, match="has index query_tables with centroids=8, split=strided, asked"
    ):
        run(make_config(index=("query_tables:split=contiguous",)))
    assert run(make_config(method=("csattention",), salt="another")).created


def test_a_method_takes_an_index_as_it_was_built(make_config: MakeConfig) -> None:
    index = ("remainder_clusters:keys_per_cluster=8", "key_clusters:moments=diagonal")
    first = run(make_config(method=("csattention",), index=index)).manifest
    notes = io.StringIO()
    config = make_config(method=("quest", "oracle+centred"))
    added = run_job(config, LineReporter(notes), io.BytesIO())
    assert (
        "has index remainder_clusters with keys_per_cluster=8 instead of keys_per_cluster=16"
        in notes.getvalue()
    )
    assert added.changed["indexes"] == "added pages"
    assert added.manifest.index("remainder_clusters") == first.index("remainder_clusters")
    assert get_method("oracle+centred").on(added.manifest).method.partition is not None
    store = Store(make_config().store)
    assert store.manifest(first.id) == added.manifest


def test_a_method_that_cannot_work_with_an_index_as_built_is_refused(make_config: MakeConfig) -> None:
    first = run(make_config(method=(), index=("remainder_clusters:moments=none",))).manifest
    with pytest.raises(MethodUnsupportedError, match="needs clusters with moments 'diagonal'"):
        run(make_config(method=("oracle+centred",)))
    assert Store(make_config().store).manifest(first.id) == first


def test_windowed_clusters_take_the_embedding_from_the_model(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(make_config(method=("multipole-windowed",), salt="at once")).manifest
    run(make_config(method=("full",)))
    monkeypatch.setattr(document_layers, "run_context", refuse_reading)
    added = run(make_config(method=("multipole-windowed",))).manifest
    assert checksums(added, "windowed_clusters") == checksums(whole, "windowed_clusters")
    assert added.methods == ("full", "multipole-windowed")


def test_what_fails_while_adding_leaves_the_context(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(make_config()).manifest

    with monkeypatch.context() as patched:
        patched.setattr(ContextWriter, "write_rows", raising(StoreFullError("no space is left")))
        with pytest.raises(StoreFullError):
            run(make_config(method=("quest",)))
    store = Store(make_config().store)
    assert store.manifest(first.id) == first
    assert store.verify(first.id) == []
    assert hidden_entries(store.path) == []
    assert run(make_config(method=("quest",))).manifest.index("pages") is not None


def add(store: Path, context: str, **changes: Any) -> PrefillReport:
    return run_add_index(AddIndexConfig(context, store, **changes), LineReporter(io.StringIO()))


def test_indexes_are_added_by_the_context_alone(make_config: MakeConfig) -> None:
    first = run(make_config(name="night", method=("csattention",))).manifest
    store = make_config().store
    report = add(
        store, "night", method=("squeezed", "refined-3"), index=("pages:size=8", "coarse_rows:key_bits=2")
    )
    assert report.manifest.id == first.id
    assert report.changed == {
        "indexes": "added key_clusters, coarse_rows_3, pages, coarse_rows",
        "methods": "now csattention, squeezed, refined-3",
    }
    assert Store(store).manifest(first.id) == report.manifest
    assert Store(store).verify(first.id) == []
    assert add(store, first.id, method=("squeezed",)).changed == {}
    assert (
        add(store, first.id[:8], method=("csattention+dropped",), index=()).manifest.methods[0]
        == "csattention"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"method": ("csattention-paper",)},
            "index paper_tables is built from thousands of the document's queries",
        ),
        ({"index": ("windowed_clusters",)}, "index windowed_clusters undoes the model's rotary embedding"),
        (
            {"index": ("key_clusters:window=64",)},
            "undoes the model's rotary embedding, which the store does not",
        ),
        ({"index": ("pages:size=0",)}, "size"),
    ],
)
def test_what_rows_do_not_suffice_for_is_refused(
    make_config: MakeConfig, changes: dict[str, Any], message: str
) -> None:
    first = run(make_config(method=("full",))).manifest
    with pytest.raises(InvalidArgumentError, match=message):
        add(make_config().store, first.id, **changes)
    assert Store(make_config().store).manifest(first.id) == first
    assert hidden_entries(make_config().store) == []


def test_nothing_to_add_and_nowhere_to_add_it(make_config: MakeConfig) -> None:
    with pytest.raises(InvalidArgumentError, match="nothing to add: give --method or --index"):
        AddIndexConfig("night", make_config().store)
    run(make_config(name="night"))
    with pytest.raises(ContextNotFoundError):
        add(make_config().store, "day", method=("quest",))


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
    plain = run(make_config(method=("refined",))).manifest
    coded = run(make_config(method=("refined",), rows="int8")).manifest
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


def test_any_method_brings_the_high_plane_and_indexes_may_be_added(make_config: MakeConfig) -> None:
    made = run(make_config(method=("squeezed",), rows="int8")).manifest
    assert made.methods == ("squeezed",)
    assert {"key_clusters", HIGH_PLANE} <= made.stored_indexes
    store = make_config().store
    report = run_add_index(
        AddIndexConfig(context=made.id, store=store, method=("quest", "refined")), reporter()
    )
    assert dict(report.changed)["indexes"] == "added pages"
    again = run(make_config(method=("squeezed",), rows="int8"))
    assert (again.created, dict(again.changed)) == (False, {})


def test_what_cannot_be_is_refused(make_config: MakeConfig, pair: tuple[Store, Manifest, Manifest]) -> None:
    with pytest.raises(InvalidArgumentError, match="needs in its usual form"):
        run(make_config(index=(f"{HIGH_PLANE}:key_bits=3",), rows="int8"))
    with pytest.raises(InvalidArgumentError, match="--rows is 'int4'"):
        make_config(rows="int4")
    _, plain, coded = pair
    with pytest.raises(ManifestError, match="beside rows in 8 bits"):
        replace(coded, indexes=())
    high = coded.index(HIGH_PLANE)
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
    shared = {"method": ("full",), "query_sample": 64}
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
