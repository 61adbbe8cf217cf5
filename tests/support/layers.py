"""Searching layers of any method over small contexts, without a store or a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from decode_engine.layers.figures import Figures
from decode_engine.layers.sparse_layer import LayerSearch, SparseLayer
from decode_engine.model.unstored import unstored_manifest
from decode_engine.steps.batch_kinds import step_attention_for
from index_store.indexes.classes import INDEX_CLASSES
from index_store.indexes.interface.layer_index import LayerIndex, LayerSource
from index_store.methods.method import IndexSpec, Method
from index_store.methods.presets import METHODS, get_method
from index_store.selection.budgets import Mass, Ratio, Threshold
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.json_fields import Scalar
from index_store.store.stored_context import QuerySample
from tests.support.memory import copy_padded

_WITH_OTHER_REMAINDERS = (
    "oracle+centred",
    "csattention+monopole",
    "oracle+coarse",
    "csattention+coarse",
    "refined+centred",
)

ALL_METHODS: Mapping[str, Method] = MappingProxyType(
    {name: method for name, method in METHODS.items() if method.sparse}
    | {name: get_method(name) for name in _WITH_OTHER_REMAINDERS}
)
"""Every method that searches, and some with another remainder."""


def presets_with_kernels(model: ModelIdentity) -> tuple[str, ...]:
    """Presets that search and run in captured steps of such a model, over contexts on the device."""

    def run(method: Method) -> bool:
        return isinstance(step_attention_for(method, unstored_manifest(model, "bfloat16", 4096)), type)

    return tuple(name for name, method in METHODS.items() if method.sparse and run(method))


_CLUSTERS: Mapping[str, Scalar] = {"keys_per_cluster": 4, "block": 64, "iterations": 3}
_SMALL: Mapping[str, Mapping[str, Scalar]] = {
    "query_tables": {"subspaces": 4, "centroids": 8, "alpha": 0.3, "iterations": 3},
    "key_clusters": _CLUSTERS,
    "cluster_tree": {**_CLUSTERS, "keys_per_coarse": 16},
    "pages": {"size": 4},
    "coarse_rows": {"iterations": 3},
}


def small_spec(spec: IndexSpec) -> IndexSpec:
    """The index with parameters for a few hundred keys. Raises LookupError for a kind that has none."""
    if spec.kind not in _SMALL:
        raise LookupError(
            f"_SMALL of {__file__} has parameters of {', '.join(_SMALL)}; add those of {spec.kind}"
        )
    return spec.with_parameters(**_SMALL[spec.kind])


def build_index(spec: IndexSpec, kv_HN2D: Tensor, group: int) -> LayerIndex:
    """An index of small parameters, from random queries."""
    if not spec.stored:
        return INDEX_CLASSES[spec.kind].from_arrays(spec.parameters, {}, kv_HN2D)
    heads, _, _, head_dim = kv_HN2D.shape
    queries = torch.randn(heads, 40, group, head_dim, generator=torch.Generator().manual_seed(99))
    frequencies = 0.1 ** torch.arange(head_dim // 2)
    source = LayerSource(kv_HN2D, QuerySample(queries, torch.arange(40)), frequencies)
    return INDEX_CLASSES[spec.kind].build(small_spec(spec).parameters, source, 0)


def build_search(method: Method, kv_HN2D: Tensor, group: int) -> LayerSearch:
    """What a layer of the method searches and approximates with."""
    assert method.index is not None
    partition = None if method.drops_remainder else method.partition
    return LayerSearch(
        build_index(method.index, kv_HN2D, group),
        None if partition is None else build_index(partition, kv_HN2D, group),
    )


def moved(search: LayerSearch, method: Method, rows_HN2D: Tensor, device: torch.device | str) -> LayerSearch:
    """The same search from arrays in device memory, and over those rows, wherever they are."""

    def there(spec: IndexSpec | None, index: LayerIndex) -> LayerIndex:
        assert spec is not None
        parameters = small_spec(spec).parameters if spec.stored else spec.parameters
        arrays = {name: copy_padded(array, device) for name, array in index.arrays().items()}
        return INDEX_CLASSES[spec.kind].from_arrays(parameters, arrays, rows_HN2D)

    partition = None if search.partition is None else there(method.partition, search.partition)
    return LayerSearch(there(method.index, search.index), partition, search.thresholds)


def build_layer(method: Method, kv_HN2D: Tensor, group: int, figures: Figures | None = None) -> SparseLayer:
    return SparseLayer(kv_HN2D, build_search(method, kv_HN2D, group), method, figures or Figures())


def with_budget(method: Method, keep: float) -> Method:
    """The method with a budget of about that share of the keys, and of exactly all of them for 1."""
    if isinstance(method.budget, Threshold):
        return replace(method, budget=Threshold(threshold=max(1e-30, 0.01 * (1.0 - keep))))
    return replace(method, budget=Mass(keep) if isinstance(method.budget, Mass) else Ratio(keep))


def with_everything(method: Method) -> Method:
    """The method with a budget of all keys, and a search that retrieves all of them."""
    search = dict(method.search)
    if "coarse_keep" in search:
        search["coarse_keep"] = 1.0
    if search.get("weights") == "uniform":  # such lists retrieve the keys that they hold and no others
        search = {"group": "pooled", "weights": "projection"}
    return replace(with_budget(method, 1.0), search=search)
