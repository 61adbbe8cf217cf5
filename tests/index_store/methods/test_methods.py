"""The registry of methods, what its expressions mean, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.default import DEFAULT_METHOD
from index_store.methods.method import INDEX_SPECS, IndexSpec, Method
from index_store.methods.presets import METHODS, get_method
from index_store.selection.budgets import REMAINDERS, Mass, Ratio, Threshold, TokenCount
from index_store.store.description.array_entry import kv_entry, tokens_entry
from index_store.store.description.json_fields import Scalar
from index_store.store.description.manifest import IndexEntry, Manifest
from tests.support.store import THRESHOLDS, synthetic_context


def specs_of(method: Method) -> list[str]:
    return [spec.name for spec in method.index_specs()]


def test_names_and_defaults() -> None:
    assert specs_of(METHODS[DEFAULT_METHOD]) == ["coarse_rows"]  # one pass over keys and values, no k-means
    for name, method in METHODS.items():
        assert method.name == name
        assert method.summary.endswith(".")
        assert method.source
        assert method.period == 1
    tables = INDEX_SPECS["query_tables"].parameters
    assert (tables["subspaces"], tables["centroids"]) == (16, 32)


def test_a_ratio_may_have_a_least_number_of_keys() -> None:
    own, other = METHODS["refined"].budget, get_method("refined", 0.1).budget
    assert isinstance(own, Ratio)
    assert isinstance(other, Ratio)
    assert [own.count(length) for length in (10, 300, 3200, 3201, 100_000)] == [16, 16, 16, 17, 500]
    assert [other.count(length) for length in (100, 300)] == [16, 30]


def test_a_budget_takes_the_place_of_the_methods_own() -> None:
    assert get_method("csattention") is METHODS["csattention"]
    assert get_method("csattention", 0.02).budget == Ratio(0.02)
    assert get_method("squeezed", 0.02).budget == Threshold(keep=0.02)
    assert get_method("tactic", 0.02).budget == Ratio(0.02)
    assert get_method("csattention", mass=0.99).budget == Mass(0.99)
    assert get_method("squeezed-tree", tokens=512).budget == TokenCount(512)
    for wrong, match in (
        ({"keep": 1.5}, "keep ratio"),
        ({"mass": 0.0}, "mass"),
        ({"tokens": 0}, "token budget"),
        ({"keep": 0.1, "mass": 0.9}, "keep ratio and target mass are given"),
    ):
        with pytest.raises(InvalidArgumentError, match=match):
            get_method("csattention", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"keep": 0.5}, {"mass": 0.5}, {"tokens": 5}, {"period": 2}])
def test_full_attention_takes_no_budget_and_no_period(given: dict[str, float]) -> None:
    with pytest.raises(MethodUnsupportedError, match="takes no"):
        get_method("full", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expression", "remainder", "specs", "optional"),
    [
        ("csattention", "centred", ["query_tables", "remainder_clusters"], True),
        ("csattention+centred", "centred", ["query_tables", "remainder_clusters"], False),
        ("csattention+dropped", "dropped", ["query_tables"], False),
        ("oracle+monopole", "monopole", ["remainder_clusters"], False),
        ("tactic+monopole", "monopole", ["key_clusters"], False),
        ("squeezed-tree+monopole", "monopole", ["cluster_tree"], False),
        ("multipole+centred", "centred", ["key_clusters", "remainder_clusters"], False),
        ("multipole+dropped", "dropped", ["key_clusters"], False),
        ("refined", "coarse", ["coarse_rows"], False),
        ("refined-3+coarse", "coarse", ["coarse_rows_3"], False),
        ("refined+dropped", "dropped", ["coarse_rows"], False),
        ("csattention+coarse", "coarse", ["query_tables", "coarse_rows"], False),
        ("csattention-paper+coarse", "coarse", ["paper_tables", "coarse_rows"], False),
        ("oracle+coarse", "coarse", ["coarse_rows"], False),
        ("multipole+coarse", "coarse", ["key_clusters", "coarse_rows"], False),
    ],
)
def test_remainders_of_expressions(expression: str, remainder: str, specs: list[str], optional: bool) -> None:
    method = get_method(expression)
    assert method.name == expression
    assert method.remainder.name == remainder
    assert specs_of(method) == specs
    assert method.partition_optional is optional


def test_periods_of_expressions() -> None:
    assert get_method("csattention@period=4").period == 4
    assert get_method("csattention@period=4", period=8).period == 8
    for option in ("lag", "correct=0.9"):
        with pytest.raises(MethodUnsupportedError, match="@lag and @correct were retired on 2026-11-28"):
            get_method(f"csattention@period=2@{option}")


def test_windows_and_search_options_of_expressions() -> None:
    method = get_method("csattention+dropped@group=pooled@sinks=0@recent=32@period=2", 0.01)
    assert method.search == {"group": "pooled", "weights": "projection"}
    assert (method.sinks, method.recent, method.append_block) == (0, 32, 64)
    assert (method.period, method.budget) == (2, Ratio(0.01))
    published = "@weights=uniform@backoff_cosine=0.5@backoff_centroids=2@append_block=16"
    same = get_method(f"csattention+dropped@group=pooled@sinks=0@recent=32{published}")
    fields = ("search", "sinks", "recent", "append_block", "drops_remainder", "budget")
    assert all(getattr(same, name) == getattr(METHODS["csattention-paper"], name) for name in fields)
    for wrong in (
        "csattention@group=each",
        "refined@group=pooled",
        "refined@colour=red",
        "csattention@sinks=-1",
    ):
        with pytest.raises(InvalidArgumentError):
            get_method(wrong)


@pytest.mark.parametrize(
    "expression",
    [
        *("", "quickest", "refined+", "refined+sixpole", "+centred", "refined@", "refined@early"),
        *("refined@period", "full@period=2", "refined@period=1.5", "refined@sinks=inf"),
        *("csattention@sinks=4", "full@sinks=16", "full@group=pooled", "REFINED", "refined ", "full+centred"),
        "csattention-paper+centred",
    ],
)
def test_expressions_that_mean_nothing_are_refused(expression: str) -> None:
    with pytest.raises(MethodUnsupportedError):
        get_method(expression)


def test_pairs_that_cannot_work_are_refused() -> None:
    tables, paper = METHODS["csattention"], METHODS["csattention-paper"]
    with pytest.raises(MethodUnsupportedError, match="both or neither"):
        replace(tables, budget=None)
    with pytest.raises(MethodUnsupportedError, match="both or neither"):
        replace(METHODS["full"], budget=Ratio(0.1))
    for method in (METHODS["quest"], paper):
        with pytest.raises(MethodUnsupportedError, match="without estimating"):
            replace(method, budget=Threshold(keep=0.1))
    with pytest.raises(InvalidArgumentError, match="backoff"):
        replace(tables, search={**tables.search, "backoff_centroids": 2})
    with pytest.raises(InvalidArgumentError, match="group"):
        replace(paper, search={"group": "softmax_sum", "weights": "uniform"})
    with pytest.raises(InvalidArgumentError, match="index kind"):
        IndexSpec("x", "ball_tree")


def test_remainders_that_cannot_work_are_refused() -> None:
    clusters = INDEX_SPECS["remainder_clusters"]
    tables = METHODS["csattention"]
    with pytest.raises(MethodUnsupportedError, match="has no clusters"):
        replace(tables, partition=None)
    for wrong in (tables, METHODS["multipole"]):
        with pytest.raises(MethodUnsupportedError, match=r"has no coarse rows; .* such as coarse_rows"):
            replace(wrong, remainder=REMAINDERS["coarse"])
    with pytest.raises(MethodUnsupportedError, match=r"has no clusters; .* such as remainder_clusters"):
        replace(METHODS["refined"], remainder=REMAINDERS["monopole"])
    with pytest.raises(MethodUnsupportedError, match=r"remainder is 'dipole': .* were retired"):
        get_method("refined+dipole")
    with pytest.raises(MethodUnsupportedError, match="needs clusters with moments 'diagonal'"):
        replace(METHODS["multipole"], remainder=REMAINDERS["centred"])
    moved = clusters.with_parameters(window=64)
    with pytest.raises(MethodUnsupportedError, match="windowed RoPE"):
        replace(tables, partition=moved)
    assert replace(tables, remainder=REMAINDERS["monopole"], partition=moved).partition == moved
    with pytest.raises(MethodUnsupportedError, match="attends to 4 sinks"):
        replace(tables, sinks=4)
    with pytest.raises(MethodUnsupportedError, match="leaves no key out"):
        replace(METHODS["full"], remainder=REMAINDERS["monopole"])


def test_index_spec_takes_overrides() -> None:
    spec = INDEX_SPECS["query_tables"].with_parameters(layout="lists", subspaces=None)
    assert spec.parameters["layout"] == "lists"
    assert spec.parameters["subspaces"] == 16
    with pytest.raises(InvalidArgumentError, match="no parameter"):
        spec.with_parameters(colour="red")


@pytest.mark.parametrize(("head_dim", "told"), [(64, False), (128, False), (256, True)])
def test_tables_of_wide_slices_are_told(head_dim: int, told: bool) -> None:
    reason = METHODS["csattention"].misfit(head_dim)
    assert ("64 subspaces" in reason and "slices of 16 channels" in reason) == told == bool(reason)
    assert [METHODS[name].misfit(head_dim) for name in ("full", "refined")] == ["", ""]
    wide = INDEX_SPECS["query_tables"].with_parameters(subspaces=64)
    assert INDEX_KINDS[wide.kind].misfit(wide.parameters, head_dim) == ""


BASE = synthetic_context(index_dtypes=()).draft
STORED = tuple(name for name, spec in INDEX_SPECS.items() if spec.stored)
PARTITIONS = ("remainder_clusters",)
ALL, SOME = (0, 1, 2), (1, 2)
FREE = {"full", "exact", "oracle"}
"""Presets that need nothing stored."""
OPTIONAL = {"csattention"}
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
        assert (spec.kind, spec.parameters) == (entry.kind, entry.parameters)
        assert fitted.searching <= set(entry.layers)
    clusters = method.index is not None and INDEX_KINDS[method.index.kind].divides_into is not None
    assert (fitted.thresholds is not None) == (clusters and where not in {"not calibrated", "only sinks"})


@pytest.mark.parametrize(
    ("expression", "where", "reason"),
    [
        ("csattention+centred", "no partitions", "needs index 'remainder_clusters'"),
        ("csattention+centred", "nothing", "needs index 'query_tables', context"),
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
