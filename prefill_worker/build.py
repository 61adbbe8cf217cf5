"""From captured keys, values and queries to a stored context, one layer at a time.

Shape legend: H KV heads, N keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from index_store.dtypes import dtype_name
from index_store.errors import InvalidArgumentError
from index_store.indexes.base import LayerIndex, QuerySample
from index_store.indexes.registry import INDEX_KINDS
from index_store.manifest import ArrayEntry, IndexEntry, ModelIdentity, index_array_entry, kv_entry
from index_store.methods import IndexSpec
from index_store.writer import ContextWriter
from prefill_worker.capture import Capture
from prefill_worker.dense_layers import Selectivity, measure_selectivity

Timer = Callable[[str], AbstractContextManager[None]]
"""Measures a block of code under the name of a phase."""


def check_build(spec: IndexSpec, identity: ModelIdentity) -> None:
    """Builds the index over a few made-up keys, so that parameters that do not suit the model's shape fail early."""
    generator = torch.Generator().manual_seed(0)
    group = identity.query_heads // identity.kv_heads
    keys = torch.randn(1, 4, identity.head_dim, generator=generator)
    queries = QuerySample(torch.randn(1, 4, group, identity.head_dim, generator=generator), torch.arange(4))
    INDEX_KINDS[spec.kind].build(spec.parameters, keys, queries, seed=0)


def measure_layers(capture: Capture) -> list[Selectivity]:
    """How selective the attention of every layer is."""
    return [
        measure_selectivity(capture.kv(layer), capture.query_sample(layer))
        for layer in range(capture.identity.layers)
    ]


def write_layers(
    writer: ContextWriter,
    capture: Capture,
    specs: Sequence[IndexSpec],
    dense_layers: Sequence[int],
    seed: int,
    timer: Timer,
    progress: Callable[[int, int], None],
) -> tuple[IndexEntry, ...]:
    """Builds every index of every layer and writes it with the layer's keys and values, freeing layer after layer.

    Dense layers get no index. Returns the manifest entries of the indexes.
    Raises InvalidArgumentError when keys or values are not finite (the stored dtype overflowed), and whatever an
    index or the writer raises.
    """
    layers = capture.identity.layers
    indexed = tuple(layer for layer in range(layers) if layer not in set(dense_layers))
    arrays: dict[str, dict[str, ArrayEntry]] = {spec.name: {} for spec in specs}
    kv = _create_kv(writer, capture)
    for layer in range(layers):
        kv_HN2D = capture.kv(layer).cpu()
        check_finite(kv_HN2D, layer)
        if layer in indexed:
            row = indexed.index(layer)
            queries = capture.query_sample(layer)
            for spec in specs:
                with timer("index"):
                    built = INDEX_KINDS[spec.kind].build(spec.parameters, kv_HN2D[:, :, 0], queries, seed)
                with timer("write"):
                    _write_index(writer, arrays[spec.name], spec.name, built, row, len(indexed))
        with timer("write"):
            for head, head_kv_N2D in enumerate(kv_HN2D):
                writer.write_chunk(kv.path, (layer, head), head_kv_N2D)
        capture.release(layer)
        progress(layer + 1, layers)
    return tuple(
        IndexEntry(spec.name, spec.kind, dict(spec.parameters), indexed, tuple(arrays[spec.name].values()))
        for spec in specs
    )


def check_finite(kv_HN2D: Tensor, layer: int) -> None:
    """Raises InvalidArgumentError when a stored key or value is NaN or infinite."""
    if not bool(torch.isfinite(kv_HN2D).all()):
        raise InvalidArgumentError(
            f"keys or values of layer {layer} are not finite in {dtype_name(kv_HN2D.dtype)}; "
            "store them with --dtype bfloat16 or float32"
        )


def _create_kv(writer: ContextWriter, capture: Capture) -> ArrayEntry:
    entry = kv_entry(capture.identity, capture.token_count, dtype_name(capture.kv(0).dtype))
    return writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)


def _write_index(
    writer: ContextWriter,
    entries: dict[str, ArrayEntry],
    name: str,
    built: LayerIndex,
    row: int,
    rows: int,
) -> None:
    """Writes one layer's arrays as row `row` of the index's arrays, which the first layer creates."""
    arrays = built.arrays()
    for array, tensor in arrays.items():
        wanted = index_array_entry(name, array, rows, tensor.shape, dtype_name(tensor.dtype))
        if array not in entries:
            entries[array] = writer.create_array(wanted.path, wanted.shape, wanted.chunks, wanted.dtype)
        if entries[array] != wanted:
            raise InvalidArgumentError(
                f"index {name}: array {array} is {tuple(tensor.shape)} {wanted.dtype} in one layer and "
                f"{entries[array].shape[1:]} {entries[array].dtype} in another; every layer must be alike"
            )
        for head, head_tensor in enumerate(tensor):
            writer.write_chunk(wanted.path, (row, head), head_tensor)
    if set(arrays) != set(entries):
        raise InvalidArgumentError(f"index {name}: layers have different arrays, {sorted(arrays)} here")
