"""Which indexes a job builds, and in which layers: those of its methods, and those named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.classes import INDEX_CLASSES
from index_store.indexes.interface.layer_index import LayerSource
from index_store.indexes.interface.retired import RETIRED_INDEXES
from index_store.methods.method import INDEX_SPECS, IndexSpec, Method
from index_store.methods.presets import METHODS, get_method
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.json_fields import Scalar
from index_store.store.description.manifest import HIGH_PLANE
from index_store.store.stored_context import QuerySample

FIXED_INDEXES = frozenset({"paper_tables"})
"""Indexes whose name promises what was published: nobody reshapes them."""

_TRIAL_KEYS = 32


@dataclass(frozen=True, slots=True)
class ChosenIndexes:
    """The indexes to build and the methods they are built for.

    methods: those asked for; with only indexes asked for, every preset that these are enough for. shaped: names of the
    indexes whose parameters were asked for, too.
    """

    specs: tuple[IndexSpec, ...]
    methods: tuple[Method, ...]
    shaped: frozenset[str]

    @property
    def method_names(self) -> tuple[str, ...]:
        """Names of the methods; the reference where there is no other."""
        return tuple(method.name for method in self.methods) or ("full",)


def choose_indexes(methods: Sequence[str], index: Sequence[str]) -> ChosenIndexes:
    """The different indexes that the methods need stored, and those that are named themselves.

    index: NAME or NAME:parameter=value,..., which reshapes the index of that name. Raises MethodUnsupportedError for an
    unknown method or for parameters that it cannot work with, InvalidArgumentError for an unknown index or parameter.
    """
    named = [_named_spec(text) for text in index]
    wanted = [get_method(name) for name in methods]
    specs = {spec.name: spec for method in wanted for spec in method.index_specs()}
    for spec in named:
        specs[spec.name] = spec
    shaped = {text.partition(":")[0] for text in index if ":" in text}
    if len({spec.name for spec in named}) != len(named):
        raise InvalidArgumentError(f"--index is {', '.join(index)}, expected different indexes")
    fitting = [fitted(method, specs) for method in wanted] if wanted else _supported_methods(specs)
    return ChosenIndexes(tuple(specs.values()), tuple(fitting), frozenset(shaped))


def with_high_plane(chosen: ChosenIndexes, identity: ModelIdentity) -> ChosenIndexes:
    """The same and the coarse copy that rows in 8 bits are half of.

    Raises InvalidArgumentError for a coarse copy that was asked for in another form, and for a model of whose layers
    none is searched.
    """
    if not identity.searched_layers:
        raise InvalidArgumentError(
            f"--rows is int8, but no layer of model {identity.name!r} is searched: they have sliding windows or an "
            "index of their own, and their rows stay as they are; leave it out"
        )
    spec = INDEX_SPECS[HIGH_PLANE]
    if HIGH_PLANE in chosen.shaped:
        raise InvalidArgumentError(
            f"--index shapes {HIGH_PLANE}, which --rows int8 needs in its usual form; leave one of them out"
        )
    specs = chosen.specs if spec in chosen.specs else (*chosen.specs, spec)
    return replace(chosen, specs=specs)


def check_centroids(chosen: ChosenIndexes, queries: int) -> None:
    """Raises InvalidArgumentError for query tables of more centroids than there are sampled queries per KV head.

    Every further centroid would repeat another one, at the price of a table row of the context's length. An index's
    own number is always taken, so that short documents need no parameters.
    """
    for spec in chosen.specs:
        wanted = spec.parameters.get("centroids")
        usual = INDEX_SPECS[spec.name].parameters.get("centroids")
        if wanted is None or wanted == usual or int(wanted) <= queries:
            continue
        raise InvalidArgumentError(
            f"--index {spec.name} has {wanted} centroids, expected at most {queries}: that many queries are sampled "
            "per KV head of this document; give fewer, a longer document or a larger --query-sample",
            centroids=wanted,
            queries=queries,
        )


def check_build(
    spec: IndexSpec,
    identity: ModelIdentity,
    inverse_frequencies: Tensor | None,
    kv_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Builds the index over a few made-up keys, so that parameters that do not suit the model's shape fail early.

    On a device this also compiles most of the kernels.
    """
    generator = torch.Generator().manual_seed(0)
    group = identity.query_heads // identity.kv_heads
    kv = torch.randn(1, _TRIAL_KEYS, 2, identity.head_dim, generator=generator)
    queries = torch.randn(1, _TRIAL_KEYS, group, identity.head_dim, generator=generator)
    sample = QuerySample(queries.to(device), torch.arange(_TRIAL_KEYS))
    source = LayerSource(kv.to(device, kv_dtype), sample, inverse_frequencies)
    INDEX_CLASSES[spec.kind].build(spec.parameters, source, seed=0)


def _named_spec(text: str) -> IndexSpec:
    name, separator, listed = text.partition(":")
    spec = INDEX_SPECS.get(name)
    if name in RETIRED_INDEXES:
        raise InvalidArgumentError(f"--index is {text!r}: {RETIRED_INDEXES[name]}", index=name)
    if spec is None or not spec.stored:
        known = ", ".join(known.name for known in INDEX_SPECS.values() if known.stored)
        raise InvalidArgumentError(f"--index is {text!r}, expected one of {known}", index=name)
    if not separator:
        return spec
    if name in FIXED_INDEXES:
        raise InvalidArgumentError(
            f"--index is {text!r}, but {name} is fixed by the paper; leave its parameters out"
        )
    return spec.with_parameters(**dict(_parameter(text, spec, pair) for pair in listed.split(",")))


def _parameter(text: str, spec: IndexSpec, pair: str) -> tuple[str, Scalar]:
    """One parameter=value, with the type that the parameter has."""
    name, _, value = pair.partition("=")
    own = spec.parameters.get(name.strip())
    if own is None:
        raise InvalidArgumentError(
            f"--index is {text!r}: cannot read {pair!r}, expected parameter=value with one of "
            f"{', '.join(spec.parameters)}"
        )
    try:
        return name.strip(), type(own)(value.strip())
    except ValueError:
        raise InvalidArgumentError(
            f"--index is {text!r}: {name.strip()} is {value!r}, expected a number such as {own}"
        ) from None


def fitted(method: Method, specs: Mapping[str, IndexSpec]) -> Method:
    """The method over the indexes as they are built, which checks that they go together."""
    index = method.index and specs.get(method.index.name, method.index)
    partition = method.partition and specs.get(method.partition.name, method.partition)
    return replace(method, index=index, partition=partition)


def _supported_methods(specs: Mapping[str, IndexSpec]) -> list[Method]:
    """The presets that these indexes are enough for, as they will work; those that store no index are left out."""
    found = []
    for method in METHODS.values():
        if method.index is None or method.index.name not in specs:
            continue
        if all(used.name in specs for used in method.index_specs()):
            found.append(fitted(method, specs))
        elif method.partition_optional:
            found.append(fitted(method.without_remainder(), specs))
    return found
