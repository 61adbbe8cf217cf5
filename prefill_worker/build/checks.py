"""Whether a job's indexes can be built, how flat layers are found, and what may not be stored.

Shape legend: H KV heads, N keys, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.store.dtypes import dtype_name
from index_store.errors import InvalidArgumentError
from index_store.methods.index_specs import IndexSpec
from index_store.indexes.interface.layer_index import LayerSource, all_finite
from index_store.store.stored_context import QuerySample
from index_store.indexes.registry import INDEX_KINDS
from index_store.store.manifest import ModelIdentity
from prefill_worker.reading.capture import Capture
from prefill_worker.build.dense_layers import (Selectivity, measure_selectivity)

_TRIAL_KEYS = 32


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
    INDEX_KINDS[spec.kind].build(spec.parameters, source, seed=0)


def measure_layers(capture: Capture) -> list[Selectivity]:
    """How selective the attention of every layer is."""
    return [
        measure_selectivity(capture.kv_on_device(layer), capture.query_sample(layer))
        for layer in range(capture.identity.layers)
    ]


def check_finite(kv_HN2D: Tensor, layer: int) -> None:
    """Raises InvalidArgumentError when a stored key or value is NaN or infinite."""
    if not all_finite(kv_HN2D):
        raise InvalidArgumentError(
            f"keys or values of layer {layer} are not finite in {dtype_name(kv_HN2D.dtype)}; "
            "store them with --dtype bfloat16 or float32"
        )
