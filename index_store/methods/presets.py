"""Methods by name: the presets, and expressions that start from one (`NAME+REMAINDER@OPTION=VALUE`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.indexes.interface.retired import DIPOLE_RETIRED, RETIRED_METHODS
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.method import INDEX_SPECS, Method
from index_store.selection.budgets import DROPPED, REMAINDERS, Budget, Mass, Ratio, Threshold, TokenCount
from index_store.store.description.json_fields import Scalar

EXPRESSION_HELP = "PRESET[+REMAINDER][@period=P][@OPTION=VALUE]"

_EXPRESSION = re.compile(
    r"(?P<preset>[a-z][a-z0-9-]*)(?:\+(?P<remainder>[a-z]+))?(?P<options>(?:@[a-z_]+(?:=[-a-z_0-9.]+)?)*)"
)
_NUMBERS = frozenset({"sinks", "recent", "append_block", "period"})
_RETIRED = frozenset({"lag", "correct"})


@dataclass(frozen=True, slots=True)
class Expression:
    """What an expression says, before it is known whether the parts go together.

    remainder: None for the preset's own. numbers: `sinks`, `recent`, `append_block` and `period`, as far as given.
    search: options of the index's search by name, of whatever kind.
    """

    preset: str
    remainder: str | None
    numbers: Mapping[str, int]
    search: Mapping[str, Scalar]


def read_expression(text: str) -> Expression:
    """The parts of `text`; raises MethodUnsupportedError for what cannot be read."""
    found = _EXPRESSION.fullmatch(text)
    if found is None:
        raise MethodUnsupportedError(f"method is {text!r}, expected {EXPRESSION_HELP}", method=text)
    numbers: dict[str, int] = {}
    search: dict[str, Scalar] = {}
    for option in found["options"].split("@")[1:]:
        key, _, value = option.partition("=")
        if key in _RETIRED:
            raise MethodUnsupportedError(
                f"method is {text!r}: @lag and @correct were retired on 2026-11-28; leave them out, or have a "
                "selection serve several steps by @period=P",
                method=text,
            )
        if not value:
            raise _unreadable(text, key, value)
        if key in _NUMBERS:
            numbers[key] = _whole(text, key, value)
        else:
            search[key] = _scalar(value)
    return Expression(found["preset"], found["remainder"], numbers, search)


def _whole(text: str, key: str, value: str) -> int:
    number = _scalar(value)
    if isinstance(number, str) or not math.isfinite(number) or number != int(number):
        raise _unreadable(text, key, value)
    return int(number)


def _scalar(value: str) -> Scalar:
    """A whole number, a number or a word, whichever it is read as first."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _unreadable(text: str, key: str, value: str) -> MethodUnsupportedError:
    given = f"@{key}={value}" if value else f"@{key}"
    return MethodUnsupportedError(
        f"method is {text!r}: cannot read {given}; expected {EXPRESSION_HELP}", method=text
    )


_REFINED = Method(
    "refined",
    "A copy of 4 bits ranks all keys, and stands for those that are not among the best.",
    "original",
    INDEX_SPECS["coarse_rows"],
    Ratio(0.005, least=16),
    REMAINDERS["coarse"],
    append_block=128,
)

_LISTED = (
    Method("full", "Exact attention to every key: the reference.", "reference", None, None),
    Method(
        "exact",
        "Full attention, which verifies several tokens a step that `refined` or texts read so far propose.",
        "original",
        None,
        None,
        drafts=_REFINED,
    ),
    Method(
        "oracle",
        "Exact top keys by true attention weight: the upper bound of any search, evaluation only.",
        "reference",
        INDEX_SPECS["exact"],
        Ratio(0.05),
    ),
    Method(
        "csattention",
        "Query tables with raw scores weighted by the query, and clusters for what was not selected.",
        "CSAttention: Centroid-Scoring Attention, improved",
        INDEX_SPECS["query_tables"],
        Ratio(0.05),
        REMAINDERS["centred"],
        INDEX_SPECS["remainder_clusters"],
        partition_optional=True,
        search={"group": "per_head", "weights": "projection"},
    ),
    Method(
        "csattention-paper",
        "Query tables as published: cosine scores in Top-L lists, pooled query, backoff, streaming insert.",
        "CSAttention: Centroid-Scoring Attention, sections 3.2-3.3 and 4.4",
        INDEX_SPECS["paper_tables"],
        Ratio(0.05),
        search={"group": "pooled", "weights": "uniform", "backoff_cosine": 0.5, "backoff_centroids": 2},
        sinks=0,
        recent=32,
        append_block=16,
    ),
    Method(
        "squeezed",
        "Key clusters above one global threshold, calibrated to the wanted share of the keys.",
        "Squeezed Attention, sections 3.1-3.2",
        INDEX_SPECS["key_clusters"],
        Threshold(keep=0.05),
    ),
    Method(
        "squeezed-tree",
        "Two-level key clusters: coarse ones prune half the keys, fine ones are cut by the threshold.",
        "Squeezed Attention, section 3.3",
        INDEX_SPECS["cluster_tree"],
        Threshold(keep=0.05),
        search={"coarse_keep": 0.5},
    ),
    Method(
        "multipole",
        "Key clusters up to a token budget; the others are attended through their centroids.",
        "Multipole Attention, sections 3.1-3.3",
        INDEX_SPECS["key_clusters"],
        Ratio(0.05),
        REMAINDERS["monopole"],
        sinks=10,
        recent=128,
        append_block=128,
    ),
    Method(
        "multipole-windowed",
        "`multipole` over keys clustered, and looked up, as if all stood 4,096 tokens before the query.",
        "Multipole Attention, section 3.1 (windowed RoPE)",
        INDEX_SPECS["windowed_clusters"],
        Ratio(0.05),
        REMAINDERS["monopole"],
        sinks=10,
        recent=128,
        append_block=128,
    ),
    Method(
        "multipole-tree",
        "Two-level key clusters; what is pruned at either level is attended through that level's centroids.",
        "Multipole Attention, section 3.4",
        INDEX_SPECS["cluster_tree"],
        Ratio(0.05),
        REMAINDERS["monopole"],
        search={"coarse_keep": 0.5},
        sinks=10,
        recent=128,
        append_block=128,
    ),
    Method(
        "tactic",
        "Key clusters until the attention mass, estimated from a fitted curve, reaches its target.",
        "Tactic: Adaptive Sparse Attention, sections 4.2-4.5",
        INDEX_SPECS["key_clusters"],
        Mass(0.9),
    ),
    Method(
        "quest",
        "Pages of 16 neighbouring keys, ranked by an upper bound of their scores.",
        "Quest, baseline",
        INDEX_SPECS["pages"],
        Ratio(0.05),
    ),
    _REFINED,
    replace(
        _REFINED,
        name="refined-3",
        summary="`refined` over a copy of 3 bits, a quarter smaller.",
        index=INDEX_SPECS["coarse_rows_3"],
        budget=Ratio(0.01, least=16),
    ),
)


METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _LISTED})


_PARTITIONS = {"monopole": "remainder_clusters", "centred": "remainder_clusters", "coarse": "coarse_rows"}


def get_method(
    name: str,
    keep: float | None = None,
    period: int | None = None,
    *,
    mass: float | None = None,
    tokens: int | None = None,
) -> Method:
    """The method that an expression names, with another budget or search period where one is given.

    An expression is a preset, possibly with another remainder (`oracle+centred`, `csattention+dropped`), a period
    of searches (`csattention@period=4`), other windows (`refined@sinks=16`) and options of the search
    (`csattention@group=pooled`). Raises MethodUnsupportedError for an unknown name, for parts that do not go together,
    or for a budget or period on a method that keeps everything, and InvalidArgumentError for an option that the index
    does not have or a value out of range.
    """
    method = _parse(name)
    given = {"keep ratio": keep, "search period": period, "target mass": mass, "token budget": tokens}
    if not method.sparse:
        for label, value in given.items():
            if value is not None:
                raise MethodUnsupportedError(
                    f"method {name!r} attends to every key and takes no {label} (got {value})", method=name
                )
        return method
    budgets = [label for label in ("keep ratio", "target mass", "token budget") if given[label] is not None]
    if len(budgets) > 1:
        raise InvalidArgumentError(f"{' and '.join(budgets)} are given, expected at most one of them")
    if keep is not None:
        method = replace(method, budget=_with_keep(method, keep))
    if mass is not None:
        method = replace(method, budget=Mass(mass))
    if tokens is not None:
        method = replace(method, budget=TokenCount(tokens))
    return method if period is None else replace(method, period=period)


def _with_keep(method: Method, keep: float) -> Budget:
    if isinstance(method.budget, Threshold):
        return Threshold(keep=keep)
    if isinstance(method.budget, Ratio):
        return replace(method.budget, keep=keep)
    return Ratio(keep)


def _parse(text: str) -> Method:
    expression = read_expression(text)
    method = preset = METHODS.get(expression.preset)
    if expression.preset in RETIRED_METHODS:
        raise MethodUnsupportedError(f"method is {text!r}: {RETIRED_METHODS[expression.preset]}", method=text)
    if method is None:
        raise MethodUnsupportedError(
            f"method is {text!r}, expected one of {', '.join(METHODS)}, or {EXPRESSION_HELP}", method=text
        )
    if expression.remainder is not None:
        method = _with_remainder(method, expression.remainder)
    if expression.numbers or expression.search:
        if not method.sparse:
            raise MethodUnsupportedError(
                f"method {text!r} attends to every key, so there is no search with options", method=text
            )
        changes: dict[str, Any] = {"search": {**method.search, **expression.search}, **expression.numbers}
        method = replace(method, **changes)
    return method if method is preset else replace(method, name=text)


def _with_remainder(method: Method, name: str) -> Method:
    if name == "dipole":
        raise MethodUnsupportedError(f"remainder is 'dipole': {DIPOLE_RETIRED}", remainder=name)
    remainder = REMAINDERS.get(name)
    if remainder is None:
        raise MethodUnsupportedError(
            f"remainder is {name!r}, expected one of {', '.join(REMAINDERS)}", remainder=name
        )
    if name == method.remainder.name:
        return replace(method, partition_optional=False)
    if remainder is DROPPED:
        return method.without_remainder()
    own = method.index is not None and INDEX_KINDS[method.index.kind].divides_into is remainder.pieces
    partition = None if own and remainder.moments == "none" else INDEX_SPECS[_PARTITIONS[name]]
    return replace(method, remainder=remainder, partition=partition, partition_optional=False)
