"""Methods on contexts: what they become where indexes lack or were built otherwise, and why they are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.index_specs import INDEX_SPECS
from index_store.methods.presets import METHODS, get_method
from index_store.store.description.array_entry import kv_entry, tokens_entry
from index_store.store.description.json_fields import Scalar
from index_store.store.description.manifest import IndexEntry, Manifest
from tests.support.store import THRESHOLDS, synthetic_context

BASE = synthetic_context(index_dtypes=()).draft
STORED = tuple(name for name, spec in INDEX_SPECS.items() if spec.stored)
PARTITIONS = ("remainder_clusters", "dipole_clusters")
ALL, SOME = (0, 1, 2), (1, 2)
FREE = {"full", "exact", "oracle"}
"""Presets that need nothing stored."""
OPTIONAL = {"csattention", "pq"}
"""Presets that do without their remainder."""
APPROXIMATING = {"multipole", "multipole-windowed", "multipole-tree", "refined", "refined-3"}
THRESHOLD = {"squeezed", "squeezed-tree"}


def context(
    names: Iterable[str] = STORED,
    layers: tuple[int, ...] = ALL,
    *,
    dense: tuple[int, ...] = (),
    calibrated: bool = True,
    built: Mapping[str, Mapping[str, Scalar]] | None = None,
) -> Manifest:
    """The manifest of a context of three layers with these indexes. built: parameters other than usual, by index."""
    entries = [
        IndexEntry(
            name,
            INDEX_SPECS[name].kind,
            {**INDEX_SPECS[name].parameters, **(built or {}).get(name, {})},
            layers,
            (),
            THRESHOLDS if calibrated and INDEX_KINDS[INDEX_SPECS[name].kind].divides_into is not None else (),
        )
        for name in names
    ]
    return replace(BASE, indexes=tuple(entries), dense_layers=dense)


def _cut(manifest: Manifest, tokens: int) -> Manifest:
    """Of a context of so many tokens."""
    kv = kv_entry(manifest.model, tokens, manifest.dtype)
    return replace(manifest, token_count=tokens, tokens=tokens_entry(tokens), kv=kv)


CONTEXTS = {
    "everything": context(),
    "nothing": context(()),
    "no partitions": context(name for name in STORED if name not in PARTITIONS),
    "flat layer": context(layers=SOME, dense=(0,)),
    "missing layer": context(layers=SOME),
    "not calibrated": context(calibrated=False),
    "only sinks": _cut(context(calibrated=False), 8),
    "flat": context((), dense=ALL),
    "moved clusters": context(built={"remainder_clusters": {"window": 64}}),
    "few sinks": context(built={"key_clusters": {"sinks": 20}, "query_tables": {"centroids": 16}}),
}
REFUSED: Mapping[str, Mapping[str, set[str]]] = {
    "everything": {},
    "nothing": {"needs index": set(METHODS) - FREE},
    "no partitions": {},
    "flat layer": {"lacks layers [0]": APPROXIMATING},
    "missing layer": {"lacks layers [0]": set(METHODS) - FREE},
    "not calibrated": {"has none; prefill it again": THRESHOLD},
    "only sinks": {"has none; all of its 8 tokens are sinks; give another budget (--mass": THRESHOLD},
    "flat": {"needs index": APPROXIMATING},
    "moved clusters": {"windowed RoPE": OPTIONAL},
    "few sinks": {"leaves out the first 20": {"squeezed", "multipole", "tactic"}},
}
"""Sentences by context, and the presets that are refused with them."""


@pytest.mark.parametrize("preset", METHODS)
@pytest.mark.parametrize("where", CONTEXTS)
def test_presets_are_refused_with_a_reason_or_run(where: str, preset: str) -> None:
    manifest, method = CONTEXTS[where], METHODS[preset]
    reasons = [reason for reason, presets in REFUSED[where].items() if preset in presets]
    if reasons:
        with pytest.raises(MethodUnsupportedError) as caught:
            method.on(manifest)
        assert reasons[0] in str(caught.value)
        assert preset in str(caught.value)
        return
    fitted = method.on(manifest)
    dropped = preset in OPTIONAL and where in {"no partitions", "flat layer", "flat"}
    assert fitted.method.drops_remainder == (dropped or method.drops_remainder)
    assert (fitted.partition is None) == (fitted.method.drops_remainder or method.partition is None)
    flat = set(manifest.dense_layers) if fitted.method.drops_remainder else set()
    assert fitted.searching == (set(ALL) - flat if method.sparse else set())
    if not fitted.searching:
        assert fitted.thresholds is None
        return
    for spec in fitted.method.index_specs():
        entry = manifest.index(spec.name)
        assert entry is not None
        assert (spec.kind, spec.parameters) == (entry.kind, entry.parameters)
        assert fitted.searching <= set(entry.layers)
    clusters = method.index is not None and INDEX_KINDS[method.index.kind].divides_into is not None
    assert (fitted.thresholds is not None) == (clusters and where not in {"not calibrated", "only sinks"})


@pytest.mark.parametrize(
    ("expression", "where", "reason"),
    [
        ("csattention+centred", "no partitions", "needs index 'remainder_clusters'"),
        ("csattention+dipole", "nothing", "needs index 'query_tables', context"),
        ("oracle+centred", "missing layer", "lacks layers [0]"),
        ("csattention+centred", "flat layer", "lacks layers [0]"),
        ("oracle+centred", "moved clusters", "windowed RoPE"),
    ],
)
def test_a_remainder_that_was_asked_for_is_not_dropped(expression: str, where: str, reason: str) -> None:
    with pytest.raises(MethodUnsupportedError) as caught:
        get_method(expression).on(CONTEXTS[where])
    assert reason in str(caught.value)


def test_what_a_refusal_advises_is_not_refused() -> None:
    only_sinks = CONTEXTS["only sinks"]
    assert get_method("squeezed", mass=0.9).on(only_sinks).searching == set(ALL)
    assert get_method("squeezed", tokens=4).on(only_sinks).searching == set(ALL)


def test_a_method_runs_with_indexes_as_they_were_built() -> None:
    fitted = METHODS["csattention"].on(CONTEXTS["few sinks"])
    assert fitted.method.index is not None
    assert fitted.method.index.parameters["centroids"] == 16
    assert get_method("csattention+monopole").on(CONTEXTS["moved clusters"]).partition is not None


def test_a_keep_ratio_is_refused_where_no_threshold_was_calibrated_for_it() -> None:
    with pytest.raises(InvalidArgumentError, match="calibrated for these"):
        get_method("squeezed", 0.9).on(CONTEXTS["everything"])
    fitted = get_method("squeezed", 0.2).on(CONTEXTS["everything"])
    assert fitted.thresholds is not None
    assert fitted.thresholds(0.2) > 0.0


def test_search_options_are_checked_against_the_index_that_was_built() -> None:
    lists = context(["query_tables"], built={"query_tables": {"layout": "lists"}})
    method = get_method("csattention+dropped@weights=uniform")
    assert method.on(context(["query_tables"])).searching == set(ALL)
    with pytest.raises(InvalidArgumentError, match="with uniform weights"):
        method.on(lists)
