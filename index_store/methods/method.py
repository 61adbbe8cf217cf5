"""Methods: named, frozen triples of index, budget and remainder, with the options that go with them.

A variant is made with `dataclasses.replace` or by an expression (`get_method`); combinations that cannot work are
refused when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.indexes.interface.index_kind import BuildParameters
from index_store.indexes.interface.retired import why_retired
from index_store.indexes.registry import INDEX_KINDS
from index_store.selection.budgets import (
    COARSE_ROWS,
    DROPPED,
    MOMENTS,
    MONOPOLE,
    Budget,
    Remainder,
    Threshold,
    ThresholdCurve,
)
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.json_fields import Scalar
from index_store.store.description.manifest import IndexEntry, Manifest


def _nothing() -> Mapping[str, Scalar]:
    return MappingProxyType({})


@dataclass(frozen=True)
class IndexSpec:
    """An index to build or to use.

    name: the folder under `index/` and the name in the manifest. kind: a key of INDEX_KINDS.
    parameters: what `LayerIndex.build` takes. stored: False for indexes that need nothing but the keys.
    """

    name: str
    kind: str
    parameters: Mapping[str, Scalar] = field(default_factory=_nothing)
    stored: bool = True

    def __post_init__(self) -> None:
        if self.kind not in INDEX_KINDS:
            raise InvalidArgumentError(
                why_retired(self.kind, self.parameters)
                or f"index kind is {self.kind!r}, expected one of {', '.join(sorted(INDEX_KINDS))}",
                kind=self.kind,
            )

    @property
    def built(self) -> BuildParameters:
        """The parameters, parsed. Raises InvalidArgumentError for what cannot be built with."""
        return INDEX_KINDS[self.kind].parameters_type.parse(self.parameters)

    def with_parameters(self, **overrides: Scalar | None) -> IndexSpec:
        """The same index with some build parameters replaced; overrides of None are ignored.

        Raises InvalidArgumentError for a parameter that the index does not know.
        """
        given = {key: value for key, value in overrides.items() if value is not None}
        unknown = sorted(set(given) - set(self.parameters))
        if unknown:
            raise InvalidArgumentError(
                f"index {self.name!r} has no parameter {', '.join(unknown)}; it has {', '.join(self.parameters)}"
            )
        return replace(self, parameters={**self.parameters, **given})


_TABLES: Mapping[str, Scalar] = {
    "layout": "dense",
    "subspaces": 16,
    "centroids": 32,
    "split": "strided",
    "scores": "dot",
    "alpha": 0.2,
    "iterations": 10,
}
_CLUSTERS: Mapping[str, Scalar] = {
    "keys_per_cluster": 16,
    "metric": "cosine",
    "block": 8192,
    "iterations": 10,
    "moments": "none",
    "window": 0,
    "sinks": 8,
}

_COARSE: Mapping[str, Scalar] = {
    "coding": "scalar",
    "key_bits": 4,
    "value_bits": 4,
    "value_group": 128,
    "iterations": 10,
}

INDEX_SPECS: Mapping[str, IndexSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            IndexSpec("exact", "exact", stored=False),
            IndexSpec("query_tables", "query_tables", _TABLES),
            IndexSpec(
                "paper_tables",
                "query_tables",
                {
                    **_TABLES,
                    "layout": "lists",
                    "subspaces": 8,
                    "centroids": 64,
                    "split": "contiguous",
                    "scores": "cosine",
                },
            ),
            IndexSpec("key_clusters", "key_clusters", _CLUSTERS),
            IndexSpec("windowed_clusters", "key_clusters", {**_CLUSTERS, "window": 4096}),
            IndexSpec("cluster_tree", "cluster_tree", {**_CLUSTERS, "keys_per_coarse": 100}),
            IndexSpec(
                "remainder_clusters",
                "key_clusters",
                {**_CLUSTERS, "metric": "euclidean", "moments": "diagonal"},
            ),
            IndexSpec("pages", "pages", {"size": 16}),
            IndexSpec("coarse_rows", "coarse_rows", _COARSE),
            IndexSpec("coarse_rows_3", "coarse_rows", {**_COARSE, "key_bits": 3, "value_bits": 3}),
        )
    }
)
"""Every index that a method may name."""


@dataclass(frozen=True)
class Method:
    """How a decode step finds and attends to keys: search, cut, attend exactly, add the remainder.

    index, budget: what is searched and how much of it is kept; both None for full attention.
    remainder: what becomes of the keys that were not selected. partition: the index whose pieces the remainder is
        computed over, None for the searched index's own. partition_optional: over a context without the partition
        the remainder is dropped, instead of refusing the context.
    sinks: first tokens of the context that are always attended. recent: newest tokens that are always attended.
    append_block: the window of recent tokens moves on in steps of this many positions, and the tail tokens that it
        leaves become searchable; it holds `recent` to `recent + append_block - 1` tokens besides the query's own.
    period: a selection serves so many decode steps (CSAttention appendix C.2). search: options of `LayerIndex.rank`.
    drafts: of full attention, the method that proposes tokens, where the context has what it searches; full attention
        verifies them, several in one step. None elsewhere.
    """

    name: str
    summary: str
    source: str
    index: IndexSpec | None
    budget: Budget | None
    remainder: Remainder = DROPPED
    partition: IndexSpec | None = None
    partition_optional: bool = False
    search: Mapping[str, Scalar] = field(default_factory=_nothing)
    sinks: int = 8
    recent: int = 64
    append_block: int = 64
    period: int = 1
    drafts: Method | None = None

    def __post_init__(self) -> None:
        if (self.index is None) != (self.budget is None):
            raise MethodUnsupportedError(
                f"method {self.name!r} has {'no' if self.index is None else 'an'} index and "
                f"{'no' if self.budget is None else 'a'} budget: a budget cuts what an index ranks, so a method has "
                "both or neither",
                method=self.name,
            )
        for label, value, least in (
            ("@sinks", self.sinks, 0),
            ("@recent", self.recent, 1),
            ("@append_block", self.append_block, 1),
            ("@period", self.period, 1),
        ):
            if value < least:
                raise InvalidArgumentError(f"{label} is {value}, expected at least {least}", field="method")
        if self.index is not None and self.budget is not None:
            self._check_pair(self.index, self.budget)
        self._check_remainder()

    @property
    def sparse(self) -> bool:
        """Whether any layer attends to less than everything."""
        return self.index is not None

    @property
    def drops_remainder(self) -> bool:
        """Whether keys that were not selected have no influence."""
        return self.remainder is DROPPED

    @property
    def one_pass(self) -> bool:
        """Whether feeding many tokens at once equals feeding them one by one."""
        return self.period == 1 and not (self.budget is not None and self.budget.per_prompt)

    def searched_range(self, position: int, keys: int) -> tuple[int, int]:
        """First key and end of what a query at `position` searches, over a context of `keys` tokens and its tail.

        The end depends on the position alone, so that it makes no difference how a prompt is cut; tail keys before it
        are searched where they are indexed.
        """
        sinks = min(self.sinks, keys)
        return sinks, max(sinks, (position - self.recent) // self.append_block * self.append_block)

    def index_specs(self) -> tuple[IndexSpec, ...]:
        """The indexes that the method needs stored: what it searches, and what its remainder is computed over."""
        specs = (self.index, None if self.drops_remainder else self.partition)
        stored = [spec for spec in specs if spec is not None and spec.stored]
        stored += () if self.drafts is None else self.drafts.index_specs()
        return tuple({spec.name: spec for spec in stored}.values())

    def misfit(self, head_dim: int) -> str:
        """Why its index, as built unasked, finds too little on heads of so many dimensions; "" where it does not."""
        return (
            "" if self.index is None else INDEX_KINDS[self.index.kind].misfit(self.index.parameters, head_dim)
        )

    def without_remainder(self) -> Method:
        """The same method over a context that lacks the partition."""
        return replace(self, remainder=DROPPED, partition=None, partition_optional=False)

    def on(self, manifest: Manifest) -> FittedMethod:
        """The method as it runs over the context.

        Raises MethodUnsupportedError unless the context holds what the method searches and approximates with, built so
        that the method can work with it, and InvalidArgumentError for a keep ratio that no threshold was calibrated
        for, a search option that an index as it was built cannot take, or a window longer than the model has positions.
        """
        self._check_windows(manifest.model)
        method = self._as_built(manifest)
        if not manifest.model.searched_layers:  # every query sees a window, or what the model itself selects
            return FittedMethod(method, manifest, frozenset(), None)
        thresholds = None
        if not method._searching_layers(manifest):  # every layer attends to everything: no index is needed
            return FittedMethod(method, manifest, frozenset(), None, self._drafting(manifest))
        for spec in method.index_specs():
            entry = method._require_entry(manifest, spec)
            searched = method.index is not None and spec.name == method.index.name
            INDEX_KINDS[entry.kind].check_options(entry.parameters, method.search if searched else {})
            lacking = method._searching_layers(manifest) - set(entry.layers)
            if lacking:
                raise MethodUnsupportedError(
                    f"method {self.name!r} searches every layer, index {spec.name!r} of context {manifest.id} lacks "
                    f"layers {sorted(lacking)}; prefill it again with --method {self.name}",
                    method=self.name,
                    context=manifest.id,
                )
            if searched:
                thresholds = method._require_thresholds(manifest, entry)
        return FittedMethod(method, manifest, method._searching_layers(manifest), thresholds)

    def _drafting(self, manifest: Manifest) -> FittedMethod | None:
        """What proposes tokens over the context; None where nothing does, or the context lacks what that searches."""
        try:
            fitted = None if self.drafts is None else self.drafts.on(manifest)
        except MethodUnsupportedError:
            return None
        return fitted if fitted is not None and fitted.searching else None

    def _as_built(self, manifest: Manifest) -> Method:
        """With the indexes as they were built; without the remainder where that may be and its clusters lack."""
        entries = [manifest.index(spec.name) for spec in self.index_specs()]
        layers = set(manifest.model.searched_layers)
        whole = all(entry is not None and layers <= set(entry.layers) for entry in entries)
        method = self.without_remainder() if self.partition_optional and not whole else self

        def as_built(spec: IndexSpec | None) -> IndexSpec | None:
            entry = manifest.index(spec.name) if spec is not None and spec.stored else None
            return (
                spec if spec is None or entry is None else IndexSpec(spec.name, entry.kind, entry.parameters)
            )

        return replace(method, index=as_built(method.index), partition=as_built(method.partition))

    def _searching_layers(self, manifest: Manifest) -> frozenset[int]:
        """The layers that attend to less than everything."""
        layers = frozenset(manifest.model.searched_layers if self.sparse else ())
        return layers - set(manifest.dense_layers) if self.drops_remainder else layers

    def _require_entry(self, manifest: Manifest, spec: IndexSpec) -> IndexEntry:
        entry = manifest.index(spec.name)
        if entry is None:
            available = ", ".join(e.name for e in manifest.indexes) or "none"
            raise MethodUnsupportedError(
                f"method {self.name!r} needs index {spec.name!r}, context {manifest.id} has {available}; "
                f"prefill it again with --method {self.name}",
                method=self.name,
                context=manifest.id,
            )
        return entry

    def _require_thresholds(self, manifest: Manifest, entry: IndexEntry) -> ThresholdCurve | None:
        """The searched index's calibration; raises where the budget needs one that is not there."""
        curve = ThresholdCurve(entry.thresholds) if entry.thresholds else None
        if isinstance(self.budget, Threshold) and self.budget.keep is not None:
            if curve is None:
                short = manifest.token_count <= int(entry.parameters.get("sinks", 0))
                todo = (
                    f"all of its {manifest.token_count} tokens are sinks; give another budget (--mass, --tokens-kept), "
                    "or use another method, such as --method full"
                    if short
                    else f"prefill it again with --method {self.name}"
                )
                raise MethodUnsupportedError(
                    f"method {self.name!r} cuts at a calibrated threshold, index {entry.name!r} of context "
                    f"{manifest.id} has none; {todo}",
                    method=self.name,
                    context=manifest.id,
                )
            curve(self.budget.keep)
        return curve

    def _check_windows(self, model: ModelIdentity) -> None:
        """Raises InvalidArgumentError for windows beyond the model's positions."""
        for option, tokens, least in (
            ("@sinks", self.sinks, 0),
            ("@recent", self.recent, 1),
            ("@append_block", self.append_block, 1),
        ):
            if tokens > model.max_positions:
                raise InvalidArgumentError(
                    f"method {self.name!r}: {option} is {tokens}, expected {least} to {model.max_positions}, the "
                    f"positions of model {model.name!r}",
                    field="method",
                )

    def _check_pair(self, index: IndexSpec, budget: Budget) -> None:
        kind = INDEX_KINDS[index.kind]
        kind.check_options(index.parameters, self.search)
        if budget.needs_logits and not index.built.estimates_logits(kind.parse_search(self.search)):
            raise MethodUnsupportedError(
                f"method {self.name!r}: a {type(budget).__name__.lower()} budget compares attention weights, and "
                f"what index {index.name!r} yields orders keys without estimating q.k; use a ratio or mass budget",
                method=self.name,
            )
        self._check_sinks(index)

    def _check_remainder(self) -> None:
        if self.drops_remainder:
            return
        named = f"method {self.name!r} with remainder {self.remainder.name!r}"
        if self.index is None:
            raise MethodUnsupportedError(
                f"{named}: full attention leaves no key out, so there is no remainder", method=self.name
            )
        spec = self.index if self.partition is None else self.partition
        needed, found = self.remainder.pieces, INDEX_KINDS[spec.kind].divides_into
        if needed is not None and found is not needed:
            such = "coarse_rows" if needed is COARSE_ROWS else "remainder_clusters"
            raise MethodUnsupportedError(
                f"{named}: index {spec.name!r} has no {needed.made_of}; give the remainder a partition such as {such}",
                method=self.name,
            )
        held = str(spec.parameters.get("moments", "none"))
        if MOMENTS.index(held) < MOMENTS.index(self.remainder.moments):
            raise MethodUnsupportedError(
                f"{named}: it needs clusters with moments {self.remainder.moments!r}, index {spec.name!r} has "
                f"{held!r}",
                method=self.name,
            )
        if self.remainder is not MONOPOLE and spec.parameters.get("window", 0):
            raise MethodUnsupportedError(
                f"{named}: exact logits cannot be taken out of clusters of keys moved by windowed RoPE; use a "
                "partition with window 0, or the monopole",
                method=self.name,
            )
        self._check_sinks(spec)

    def _check_sinks(self, spec: IndexSpec) -> None:
        left_out = spec.parameters.get("sinks", 0)
        if isinstance(left_out, int) and self.sinks < left_out:
            raise MethodUnsupportedError(
                f"method {self.name!r} attends to {self.sinks} sinks, but index {spec.name!r} leaves out the first "
                f"{left_out} keys: those between would be lost",
                method=self.name,
            )


@dataclass(frozen=True, slots=True)
class FittedMethod:
    """A method on a context that holds all it needs (`Method.on`): resolved once, and valid as long as the context.

    method: with its indexes as they were built, and without its remainder where that is optional and its clusters
    lack. searching: layers that attend to less than everything. thresholds: the searched index's offline calibration,
    from keep ratio to threshold; None when it has none. drafting: what proposes tokens; None where nothing does.
    """

    method: Method
    manifest: Manifest
    searching: frozenset[int]
    thresholds: Callable[[float], float] | None
    drafting: FittedMethod | None = None

    @property
    def partition(self) -> IndexSpec | None:
        """The index besides the searched one, whose pieces make the remainder; None where there is none."""
        return None if self.method.drops_remainder else self.method.partition


def misfits(manifest: Manifest) -> list[str]:
    """A sentence for every index of a context that finds too little on its model's heads, as it was built."""
    dim = manifest.model.head_dim
    known = [entry for entry in manifest.indexes if entry.kind in INDEX_KINDS]
    told = ((entry.name, INDEX_KINDS[entry.kind].misfit(entry.parameters, dim)) for entry in known)
    return [f"index {name}: {reason}" for name, reason in told if reason]
