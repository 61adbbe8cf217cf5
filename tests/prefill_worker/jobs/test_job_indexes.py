"""Which indexes a job stores, in which layers, and what they are calibrated on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from index_store.errors import (
    InvalidArgumentError,
)
from index_store.indexes.interface.layer_index import LayerIndex
from index_store.memory.arena import Arena
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import load_model, load_tokenizer, resolve_model
from index_store.selection.budgets import Threshold
from index_store.selection.cutting import cut
from index_store.selection.threshold_curve import ThresholdCurve
from index_store.store.catalog import Store
from index_store.store.stored_context import QuerySample
from prefill_worker.reading.capture import Capture, register_attention
from prefill_worker.reading.prefill import run_context
from prefill_worker.reading.query_sample import plan_sample
from tests.prefill_worker.conftest import DOCUMENT
from tests.prefill_worker.jobs.support_jobs import MakeConfig, hidden_entries, run
from tests.support.models import write_model_folder
from tests.support.search import step


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


def test_flags_of_the_index_leave_the_published_method_as_it_is(make_config: MakeConfig) -> None:
    manifest = run(
        make_config(method=("csattention-paper", "csattention"), tables="lists", centroids=8)
    ).manifest
    indexes = {index.name: index.parameters for index in manifest.indexes}
    paper, improved = METHODS["csattention-paper"].index, METHODS["csattention"].index
    assert paper is not None
    assert improved is not None
    assert indexes["paper_tables"] == paper.parameters
    assert indexes["query_tables"] == {**improved.parameters, "centroids": 8, "layout": "lists"}


def test_as_many_centroids_as_sampled_queries_and_no_more(make_config: MakeConfig) -> None:
    """17 positions, each with the queries of two heads to a KV head."""
    most = make_config(method=("csattention",), input=(Path("-"),), centroids=34)
    assert run(most, b"x" * 17).manifest.indexes[0].parameters["centroids"] == 34
    with pytest.raises(InvalidArgumentError, match="--centroids is 35, expected at most 34"):
        run(replace(most, centroids=35), b"x" * 17)
    assert run(replace(most, centroids=32), b"x").created  # the method's own number


def test_named_indexes_join_those_of_the_methods(make_config: MakeConfig) -> None:
    config = make_config(method=("squeezed",), index=("pages:size=8", "cluster_tree"), dense_layers="1")
    manifest = run(config).manifest
    assert manifest.methods == ("squeezed",)
    indexes = {index.name: index for index in manifest.indexes}
    assert {name: index.layers for name, index in indexes.items()} == {
        "key_clusters": (0, 1),
        "cluster_tree": (0, 1),
        "pages": (0, 1),
    }
    assert indexes["pages"].parameters == {"size": 8}
    assert Store(config.store).verify(manifest.id) == []
    alone = run(make_config(method=(), index=("key_clusters",), salt="alone")).manifest
    assert alone.methods == ("squeezed", "multipole", "tactic")


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
