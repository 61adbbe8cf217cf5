"""From captured keys, values and queries to a stored context, one layer at a time.

Shape legend: H KV heads, N keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.calibration import ThresholdCalibrator
from index_store.dtypes import dtype_name
from index_store.errors import InvalidArgumentError
from index_store.index_specs import IndexSpec
from index_store.indexes.base import LayerIndex, LayerSource, QuerySample
from index_store.indexes.registry import INDEX_KINDS
from index_store.manifest import (
    ArrayEntry,
    IndexEntry,
    ModelIdentity,
    index_array_entry,
    kv_entry,
    queries_entry,
)
from index_store.writer import ContextWriter
from prefill_worker.capture import Capture
from prefill_worker.dense_layers import Selectivity, measure_selectivity
from prefill_worker.late_queries import calibrate, stored_rows

Timer = Callable[[str], AbstractContextManager[None]]
"""Measures a block of code under the name of a phase."""

_TRIAL_KEYS = 32


@dataclass(frozen=True, slots=True)
class WrittenLayers:
    """What the manifest says about the layers that were written."""

    indexes: tuple[IndexEntry, ...]
    queries: ArrayEntry
    query_positions: tuple[int, ...]


def check_build(spec: IndexSpec, identity: ModelIdentity, inverse_frequencies: Tensor | None) -> None:
    """Builds the index over a few made-up keys, so that parameters that do not suit the model's shape fail early."""
    generator = torch.Generator().manual_seed(0)
    group = identity.query_heads // identity.kv_heads
    kv = torch.randn(1, _TRIAL_KEYS, 2, identity.head_dim, generator=generator)
    queries = torch.randn(1, _TRIAL_KEYS, group, identity.head_dim, generator=generator)
    sample = QuerySample(queries, torch.arange(_TRIAL_KEYS))
    INDEX_KINDS[spec.kind].build(spec.parameters, LayerSource(kv, sample, inverse_frequencies), seed=0)


def measure_layers(capture: Capture) -> list[Selectivity]:
    """How selective the attention of every layer is."""
    return [
        measure_selectivity(capture.kv(layer), capture.query_sample(layer))
        for layer in range(capture.identity.layers)
    ]


def write_layers(
    writer: ContextWriter,
    capture: Capture,
    indexes: Sequence[tuple[IndexSpec, Sequence[int]]],
    inverse_frequencies: Tensor | None,
    seed: int,
    timer: Timer,
    progress: Callable[[int, int], None],
) -> WrittenLayers:
    """Writes keys, values and a sample of the queries layer by layer, builds the indexes, and frees layer after layer.

    indexes: every index with the layers that it covers. Thresholds of indexes with clusters are calibrated on the late
    queries of all layers. inverse_frequencies: [d/2] of the rotary embedding, where it has that form.
    Raises InvalidArgumentError when keys or values are not finite (the stored dtype overflowed), and whatever an
    index or the writer raises.
    """
    layers = capture.identity.layers
    building = [_Building(writer, spec, tuple(covered), seed, timer) for spec, covered in indexes]
    kv = _create(writer, kv_entry(capture.identity, capture.token_count, dtype_name(capture.kv(0).dtype)))
    rows_P = stored_rows(capture.query_sample(0).positions_P, capture.token_count)
    queries = _create(writer, queries_entry(capture.identity, len(rows_P)))
    positions: Tensor = capture.query_sample(0).positions_P[rows_P]
    for layer in range(layers):
        kv_HN2D = capture.kv(layer).cpu()
        check_finite(kv_HN2D, layer)
        source = LayerSource(kv_HN2D, capture.query_sample(layer), inverse_frequencies)
        for index in building:
            index.add(layer, source)
        with timer("write"):
            for head, head_kv_N2D in enumerate(kv_HN2D):
                writer.write_chunk(kv.path, (layer, head), head_kv_N2D)
            for head, head_PGD in enumerate(source.queries.queries_HPGD[:, rows_P]):
                writer.write_chunk(queries.path, (layer, head), head_PGD)
        capture.release(layer)
        progress(layer + 1, layers)
    return WrittenLayers(tuple(index.entry() for index in building), queries, tuple(positions.tolist()))


def check_finite(kv_HN2D: Tensor, layer: int) -> None:
    """Raises InvalidArgumentError when a stored key or value is NaN or infinite."""
    if not bool(torch.isfinite(kv_HN2D).all()):
        raise InvalidArgumentError(
            f"keys or values of layer {layer} are not finite in {dtype_name(kv_HN2D.dtype)}; "
            "store them with --dtype bfloat16 or float32"
        )


def _create(writer: ContextWriter, entry: ArrayEntry) -> ArrayEntry:
    return writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)


class _Building:
    """One index on its way into the store, layer after layer."""

    def __init__(
        self, writer: ContextWriter, spec: IndexSpec, layers: tuple[int, ...], seed: int, timer: Timer
    ) -> None:
        self._writer = writer
        self._spec = spec
        self._layers = layers
        self._seed = seed
        self._timer = timer
        self._arrays: dict[str, ArrayEntry] = {}
        self._calibrator = ThresholdCalibrator()

    def add(self, layer: int, source: LayerSource) -> None:
        """Builds, calibrates and writes the index of a layer, where it covers the layer."""
        if layer not in self._layers:
            return
        kind = INDEX_KINDS[self._spec.kind]
        with self._timer("index"):
            built = kind.build(self._spec.parameters, source, self._seed)
        if kind.partitions:
            with self._timer("thresholds"):
                calibrate(self._calibrator, built, source, int(self._spec.parameters.get("sinks", 0)))
        with self._timer("write"):
            self._write(built, self._layers.index(layer))

    def entry(self) -> IndexEntry:
        """The finished index as the manifest describes it."""
        return IndexEntry(
            self._spec.name,
            self._spec.kind,
            dict(self._spec.parameters),
            self._layers,
            tuple(self._arrays.values()),
            self._calibrator.thresholds,
        )

    def _write(self, built: LayerIndex, row: int) -> None:
        """Writes one layer's arrays as row `row` of the index's arrays, which the first layer creates."""
        arrays, entries, name = built.arrays(), self._arrays, self._spec.name
        for array, tensor in arrays.items():
            wanted = index_array_entry(name, array, len(self._layers), tensor.shape, dtype_name(tensor.dtype))
            if array not in entries:
                entries[array] = _create(self._writer, wanted)
            if entries[array] != wanted:
                raise InvalidArgumentError(
                    f"index {name}: array {array} is {tuple(tensor.shape)} {wanted.dtype} in one layer and "
                    f"{entries[array].shape[1:]} {entries[array].dtype} in another; every layer must be alike"
                )
            for head, head_tensor in enumerate(tensor):
                self._writer.write_chunk(wanted.path, (row, head), head_tensor)
        if set(arrays) != set(entries):
            raise InvalidArgumentError(f"index {name}: layers have different arrays, {sorted(arrays)} here")
