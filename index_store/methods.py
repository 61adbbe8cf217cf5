"""Methods: named, frozen combinations of index, budget and search options.

A variant is made with `dataclasses.replace`; combinations that cannot work are refused when they are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from index_store.budgets import Budget, Ratio
from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.indexes.base import Scalar
from index_store.indexes.registry import INDEX_KINDS


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
                f"index kind is {self.kind!r}, expected one of {', '.join(sorted(INDEX_KINDS))}",
                kind=self.kind,
            )


@dataclass(frozen=True)
class Method:
    """How a decode step finds and attends to keys: search, cut, attend exactly.

    index, budget: what is searched and how much of it is kept; both None for full attention.
    sinks: first tokens of the context that are always attended. recent: newest tokens that are always attended.
    append_block: the window of recent tokens moves on in steps of this many positions, and the tail tokens that it
        leaves become searchable; it holds `recent` to `recent + append_block - 1` tokens besides the query's own.
    period: a selection is reused for this many decode steps (CSAttention appendix C.2); 1 searches every step.
    search: options of `LayerIndex.rank`.
    """

    name: str
    summary: str
    source: str
    index: IndexSpec | None
    budget: Budget | None
    search: Mapping[str, Scalar] = field(default_factory=_nothing)
    sinks: int = 8
    recent: int = 64
    append_block: int = 64
    period: int = 1

    def __post_init__(self) -> None:
        if (self.index is None) != (self.budget is None):
            raise MethodUnsupportedError(
                f"method {self.name!r} has {'no' if self.index is None else 'an'} index and "
                f"{'no' if self.budget is None else 'a'} budget: a budget cuts what an index ranks, so a method has "
                "both or neither",
                method=self.name,
            )
        for label, value, least in (
            ("sinks", self.sinks, 0),
            ("recent", self.recent, 1),
            ("append_block", self.append_block, 1),
            ("period", self.period, 1),
        ):
            if value < least:
                raise InvalidArgumentError(f"{label} is {value}, expected at least {least}")
        if self.index is not None:
            INDEX_KINDS[self.index.kind].check_options(self.index.parameters, self.search)

    @property
    def sparse(self) -> bool:
        """Whether any layer attends to less than everything."""
        return self.index is not None


_QUERY_TABLES = IndexSpec(
    "query_tables",
    "query_tables",
    {
        "layout": "dense",
        "subspaces": 16,
        "centroids": 32,
        "split": "strided",
        "scores": "dot",
        "alpha": 0.2,
        "iterations": 10,
    },
)
_PAPER_TABLES = IndexSpec(
    "paper_tables",
    "query_tables",
    {
        "layout": "lists",
        "subspaces": 8,
        "centroids": 64,
        "split": "contiguous",
        "scores": "cosine",
        "alpha": 0.2,
        "iterations": 10,
    },
)

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            Method(
                "full",
                "Exact attention to every key: the reference.",
                "reference",
                None,
                None,
            ),
            Method(
                "oracle",
                "Exact top keys by true attention weight: the upper bound of any search, evaluation only.",
                "reference",
                IndexSpec("exact", "exact", stored=False),
                Ratio(0.05),
            ),
            Method(
                "csattention",
                "Query tables with raw scores weighted by the query, softmax summed over the group.",
                "CSAttention: Centroid-Scoring Attention, improved",
                _QUERY_TABLES,
                Ratio(0.05),
                {"group": "softmax_sum", "weights": "projection"},
            ),
            Method(
                "csattention-paper",
                "Query tables as published: cosine scores in Top-L lists, pooled query, backoff, streaming insert.",
                "CSAttention: Centroid-Scoring Attention, sections 3.2-3.3 and 4.4",
                _PAPER_TABLES,
                Ratio(0.05),
                {"group": "pooled", "weights": "uniform", "backoff_cosine": 0.5, "backoff_centroids": 2},
                sinks=0,
                recent=32,
                append_block=1,
            ),
        )
    }
)

DEFAULT_METHOD = "csattention"


def get_method(name: str, keep: float | None = None, period: int | None = None) -> Method:
    """The named method, with another keep ratio or search period where one is given.

    Raises MethodUnsupportedError for an unknown name, or for a ratio or period on a method that keeps everything, and
    InvalidArgumentError for a value out of range.
    """
    method = METHODS.get(name)
    if method is None:
        raise MethodUnsupportedError(f"method is {name!r}, expected one of {', '.join(METHODS)}", method=name)
    if not method.sparse and (keep is not None or period is not None):
        given = f"keep ratio (got {keep})" if keep is not None else f"search period (got {period})"
        raise MethodUnsupportedError(
            f"method {name!r} attends to every key and takes no {given}", method=name
        )
    if keep is not None:
        method = replace(method, budget=Ratio(keep))
    return method if period is None else replace(method, period=period)


def index_spec(method: Method, **overrides: Scalar | None) -> IndexSpec | None:
    """The index that the method needs stored, with some build parameters replaced; None when it stores none.

    Overrides of None are ignored. Raises InvalidArgumentError for a parameter that the index does not know.
    """
    if method.index is None or not method.index.stored:
        return None
    given = {key: value for key, value in overrides.items() if value is not None}
    unknown = sorted(set(given) - set(method.index.parameters))
    if unknown:
        raise InvalidArgumentError(
            f"index {method.index.name!r} has no parameter {', '.join(unknown)}; it has "
            f"{', '.join(method.index.parameters)}"
        )
    spec = replace(method.index, parameters={**method.index.parameters, **given})
    INDEX_KINDS[spec.kind].check_options(spec.parameters, method.search)
    return spec
