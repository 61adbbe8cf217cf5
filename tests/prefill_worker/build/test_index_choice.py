"""Which indexes a job builds, in which layers, and for which methods; flat attention is told from peaked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.jobs.job_record import DENSE_ERROR
from index_store.methods.method import INDEX_SPECS
from index_store.store.stored_context import QuerySample
from prefill_worker.build.dense_layers import choose_dense_layers, measure_selectivity
from prefill_worker.build.index_choice import ChosenIndexes, choose_indexes
from prefill_worker.config import PrefillConfig


def plan(*methods: str, **changes: Any) -> ChosenIndexes:
    settings = {
        "model": "reader",
        "store": Path("store"),
        "input": (Path("-"),),
        "method": methods,
        **changes,
    }
    config = PrefillConfig(**settings)
    return choose_indexes(config.methods, config.index)


def names(found: ChosenIndexes) -> set[str]:
    return {spec.name for spec in found.specs}


@pytest.mark.parametrize(
    ("methods", "indexes", "expected"),
    [
        (("csattention",), (), {"query_tables", "remainder_clusters"}),
        (("csattention+dropped",), (), {"query_tables"}),
        (("csattention+dipole", "quest"), (), {"query_tables", "dipole_clusters", "pages"}),
        (("full", "oracle"), (), set()),
        (("oracle+centred",), (), {"remainder_clusters"}),
        (("squeezed", "multipole", "tactic"), (), {"key_clusters"}),
        (("squeezed-tree",), ("pages", "dipole_clusters"), {"cluster_tree", "pages", "dipole_clusters"}),
        ((), ("key_clusters",), {"key_clusters"}),
        (("quest",), ("remainder_clusters",), {"pages", "remainder_clusters"}),
    ],
)
def test_indexes_of_methods_join_those_named(
    methods: tuple[str, ...], indexes: tuple[str, ...], expected: set[str]
) -> None:
    found = plan(*methods, index=indexes)
    assert names(found) == expected
    assert [spec for spec in found.specs if spec != INDEX_SPECS[spec.name]] == []
    if methods:
        assert found.method_names == methods


@pytest.mark.parametrize(
    ("indexes", "methods"),
    [
        (("key_clusters",), ("squeezed", "multipole", "tactic")),
        (("cluster_tree", "pages"), ("squeezed-tree", "multipole-tree", "quest")),
        (("query_tables",), ("csattention",)),
        (("remainder_clusters",), ("full",)),
        (("remainder_clusters", "pages"), ("quest",)),
        (tuple(name for name, spec in INDEX_SPECS.items() if spec.stored), None),
    ],
)
def test_named_indexes_alone_serve_the_presets_they_are_enough_for(
    indexes: tuple[str, ...], methods: tuple[str, ...] | None
) -> None:
    found = plan(index=indexes)
    assert names(found) == set(indexes)
    if methods is not None:
        assert found.method_names == methods
    else:
        assert found.method_names[0] == "csattention"
        assert not {"full", "oracle"} & set(found.method_names)


def test_parameters_of_a_named_index() -> None:
    found = plan("squeezed", index=("key_clusters:window=4096, keys_per_cluster=32,metric=euclidean",))
    (spec,) = found.specs
    assert spec.parameters == {
        **INDEX_SPECS["key_clusters"].parameters,
        "window": 4096,
        "keys_per_cluster": 32,
        "metric": "euclidean",
    }
    assert found.methods[0].index == spec


@pytest.mark.parametrize(
    ("indexes", "message"),
    [
        (("nothing",), "--index is 'nothing', expected one of query_tables"),
        (("exact",), "--index is 'exact', expected one of query_tables"),
        (("pages", "pages:size=8"), "expected different indexes"),
        (("pages:size",), "size is '', expected a number such as 16"),
        (("pages:size=many",), "size is 'many', expected a number such as 16"),
        (("pages:sise=8",), "cannot read 'sise=8', expected parameter=value"),
        (("pages:",), "cannot read ''"),
        (("paper_tables:subspaces=4",), "fixed by the paper"),
    ],
)
def test_indexes_that_cannot_be_named_so_are_refused(indexes: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        plan(index=indexes)


@pytest.mark.parametrize(
    ("methods", "changes", "message"),
    [
        (
            ("csattention",),
            {"index": ("remainder_clusters:moments=none",)},
            "needs clusters with moments 'diagonal', index 'remainder_clusters' has 'none'",
        ),
        (("squeezed+fancy",), {}, "remainder is 'fancy'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    methods: tuple[str, ...], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((InvalidArgumentError, MethodUnsupportedError), match=message):
        plan(*methods, **changes)


HEADS, GROUP, KEYS, DIM, ROWS = 2, 3, 3000, 32, 100


def layer(sharpness: float, seed: int = 0) -> tuple[Tensor, QuerySample]:
    """Random keys and values; queries point at single keys, the more sharply the larger `sharpness` is."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(HEADS, KEYS, 2, DIM, generator=generator)
    positions = torch.arange(KEYS - ROWS, KEYS)
    targets = torch.randint(0, KEYS - ROWS, (HEADS, ROWS, GROUP), generator=generator)
    queries = torch.stack([kv[head, targets[head], 0] for head in range(HEADS)]) * sharpness
    return kv, QuerySample(queries, positions)


def test_peaked_attention_is_captured() -> None:
    measured = measure_selectivity(*layer(4.0))
    assert measured.captured > 0.99
    assert measured.output_error < 0.01


def test_flat_attention_is_not() -> None:
    measured = measure_selectivity(*layer(0.05))
    assert measured.captured < 0.15
    assert measured.output_error > 0.5


def test_keeping_everything_is_exact() -> None:
    measured = measure_selectivity(*layer(0.05), keep=1.0)
    assert measured.captured == pytest.approx(1.0, abs=1e-5)
    assert measured.output_error < 1e-5


def test_the_group_shares_its_selection() -> None:
    """Three heads of a group that look at three different keys need three keys, not one each."""
    kv, sample = layer(8.0)
    one_key = measure_selectivity(kv, sample, keep=1 / KEYS, sinks=0, recent=1)
    three_keys = measure_selectivity(kv, sample, keep=3 / KEYS, sinks=0, recent=1)
    assert one_key.captured == pytest.approx(1 / 3, abs=0.05)
    assert three_keys.captured > 0.95


def test_keys_after_the_query_do_not_count() -> None:
    kv, sample = layer(1.0)
    early = QuerySample(sample.queries_HPGD, sample.positions_P - 1000)
    before = measure_selectivity(kv, early)
    kv[:, KEYS - 1000 :] = 50.0
    assert measure_selectivity(kv, early) == before


def test_sinks_and_recent_window_are_always_kept() -> None:
    kv, sample = layer(0.01)
    measured = measure_selectivity(kv, sample, keep=1 / KEYS, sinks=1000, recent=2000)
    assert measured.captured > 0.98


def test_calibration_queries_beyond_the_context_are_judged_too() -> None:
    kv, sample = layer(4.0)
    beyond = QuerySample(sample.queries_HPGD, sample.positions_P + 500)
    assert measure_selectivity(kv, beyond).captured > 0.99


def test_the_rule_picks_flat_layers() -> None:
    measured = [measure_selectivity(*layer(sharpness)) for sharpness in (0.05, 4.0, 0.3, 8.0)]
    assert choose_dense_layers(measured) == (0, 2)
    assert choose_dense_layers(measured, threshold=10.0) == ()
    assert measured[1].output_error < DENSE_ERROR < measured[2].output_error
