"""From captured keys, values and queries to arrays in the store: one layer is built while others are written.

On a device indexes are built on a stream of their own, in a thread of their own; finished chunks go to threads that
copy them into page-locked memory, compute their checksums and write them. At most two layers are under way. On a CPU,
where building takes all cores, only the writing is beside it.

Shape legend: H KV heads, N keys, R rows of the query sample, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.layer_index import LayerIndex, LayerSource, all_finite
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.index_specs import IndexSpec
from index_store.selection.calibration import ThresholdCalibrator
from index_store.store.dtypes import dtype_name
from index_store.store.manifest import ArrayEntry, IndexEntry, index_array_entry, kv_entry, queries_entry
from index_store.store.writer import ContextWriter
from prefill_worker.build.dense_layers import Selectivity, measure_selectivity
from prefill_worker.build.stages import BuildStream, ChunkWriting, Stage, Timer
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.query_sample import late_rows, stored_rows

UNDER_WAY = 2
"""Layers that are built or written at a time."""

WRITERS = 4
"""Threads that copy, compute checksums and write."""

_ROWS_AT_ONCE = 16
_RECENT = 64


@dataclass(frozen=True, slots=True)
class WrittenLayers:
    """What the manifest says about the layers that were written.

    selectivity: of every layer, where it was to be measured.
    """

    indexes: tuple[IndexEntry, ...]
    queries: ArrayEntry
    query_positions: tuple[int, ...]
    selectivity: tuple[Selectivity, ...]


class LayerWriting:
    """Builds and writes all layers of a capture, and frees each when it is written. Use as a context manager.

    Layers are added in order as soon as the model has passed them. Leaving the block before `finish` has returned
    drops what has not begun and waits for what has.
    """

    def __init__(
        self,
        writer: ContextWriter,
        capture: Capture,
        inverse_frequencies: Tensor | None,
        seed: int,
        timer: Timer,
        overlap: bool = True,
    ) -> None:
        """inverse_frequencies: [d/2] of the rotary embedding, where it has that form. overlap: False: no threads."""
        self._writer = writer
        self._capture = capture
        self._frequencies = inverse_frequencies
        self._seed = seed
        self._timer = timer
        self._stages = ExitStack()
        on_device = capture.device.type == "cuda"
        self._building = Stage(1 if overlap and on_device else 0, "build")
        self._chunk_stage = Stage(WRITERS if overlap else 0, "write")
        self._chunks = ChunkWriting(writer, self._chunk_stage, timer)
        self._stream = BuildStream(capture.device)
        self._stopped = False
        self._ready: list[Callable[[], None]] = []
        self._built: list[Future[None]] = []
        self._writes: list[list[Future[None]]] = []
        self._written = 0

    def __enter__(self) -> Self:
        self._stages.enter_context(self._chunk_stage)
        self._stages.enter_context(self._building)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped = True
        self._stages.close()

    def begin(
        self,
        indexes: Sequence[tuple[IndexSpec, Sequence[int]]],
        measured: Sequence[Selectivity] | None = None,
        measure: bool = False,
    ) -> None:
        """Creates the arrays of keys, values and queries. Comes before the first `add`.

        indexes: every index with the layers that it covers. measured: how selective the attention of every layer is,
        if that is known; with `measure` it is found out on the way.
        """
        self._measured = dict(enumerate(measured or ()))
        capture = self._capture
        self._indexes = [
            IndexWriting(self._writer, spec, tuple(covered), self._seed) for spec, covered in indexes
        ]
        self._measure = measure
        self._kv = create(
            self._writer, kv_entry(capture.identity, capture.token_count, dtype_name(capture.kv_dtype))
        )
        positions_P = capture.sample_positions
        self._rows_P = stored_rows(positions_P, capture.token_count)
        self._queries = create(self._writer, queries_entry(capture.identity, len(self._rows_P)))
        self._positions = tuple(positions_P[self._rows_P].tolist())

    def add(self, layer: int) -> None:
        """The layer's keys, values and queries are complete once what the caller's stream was asked for is done."""
        if layer != len(self._ready):
            raise ValueError(f"layer {layer} was added, expected layer {len(self._ready)}")
        self._ready.append(self._stream.mark())
        self._proceed()

    def finish(self, progress: Callable[[int, int], None]) -> WrittenLayers:
        """Adds the layers that were not, waits until all are written; `progress` gets layers done and layers in all.

        Raises InvalidArgumentError when keys or values are not finite (the stored dtype overflowed), and whatever an
        index or the writer raises: the first error, in the order of layers.
        """
        layers = self._capture.identity.layers
        for layer in range(layers):
            while len(self._ready) < min(layers, layer + UNDER_WAY):
                self.add(len(self._ready))
            self._built[layer].result()
            for write in self._writes[layer]:
                write.result()
            self._writes[layer].clear()
            self._capture.release(layer)
            self._written += 1
            self._proceed()
            progress(self._written, layers)
        return WrittenLayers(
            tuple(index.entry() for index in self._indexes),
            self._queries,
            self._positions,
            tuple(self._measured[layer] for layer in sorted(self._measured)),
        )

    def _proceed(self) -> None:
        """Starts on added layers, as many as may be under way."""
        while len(self._built) < min(len(self._ready), self._written + UNDER_WAY):
            layer = len(self._built)
            self._writes.append([])
            self._built.append(self._building.submit(lambda layer=layer: self._build(layer)))  # type: ignore[misc]

    def _build(self, layer: int) -> None:
        self._ready[layer]()
        writes = self._writes[layer]
        with self._stream.running():
            kv_HN2D = self._capture.kv_on_device(layer)
            check_finite(kv_HN2D, layer)
            sample = self._capture.query_sample(layer)
            stored_HPGD = sample.queries_HPGD[:, self._rows_P]
            starts = self._capture.cluster_starts(layer)
        source = LayerSource(kv_HN2D, sample, self._frequencies, starts)
        for head, head_kv_N2D in enumerate(self._capture.kv(layer)):
            writes.append(self._chunks.submit(self._kv.path, (layer, head), head_kv_N2D))
        for head, head_PGD in enumerate(stored_HPGD):
            writes.append(self._chunks.submit(self._queries.path, (layer, head), head_PGD))
        if self._measure:
            with self._timer("dense_layers"), self._stream.running():
                self._measured[layer] = measure_selectivity(kv_HN2D, sample)
        for index in self._indexes:
            if self._stopped:
                return
            built = index.build(layer, source, self._timer, self._stream)
            for path, indices, chunk in index.chunks(layer, built):
                writes.append(self._chunks.submit(path, indices, chunk))


class IndexWriting:
    """One index on its way into the store, layer after layer."""

    def __init__(self, writer: ContextWriter, spec: IndexSpec, layers: tuple[int, ...], seed: int) -> None:
        self._writer = writer
        self._spec = spec
        self._layers = layers
        self._seed = seed
        self._arrays: dict[str, ArrayEntry] = {}
        self._calibrator = ThresholdCalibrator()

    def build(self, layer: int, source: LayerSource, timer: Timer, stream: BuildStream) -> LayerIndex | None:
        """Builds and calibrates the index of a layer; None where it does not cover the layer."""
        if layer not in self._layers:
            return None
        kind = INDEX_KINDS[self._spec.kind]
        with timer("index"), stream.running():
            built = kind.build(self._spec.parameters, source, self._seed)
        if kind.partitions:
            with timer("thresholds"), stream.running():
                calibrate(self._calibrator, built, source, int(self._spec.parameters.get("sinks", 0)))
        return built

    def chunks(self, layer: int, built: LayerIndex | None) -> list[tuple[str, tuple[int, int], Tensor]]:
        """Path, place and contents of one layer's chunks, in arrays that the first layer creates."""
        if built is None:
            return []
        row = self._layers.index(layer)
        arrays, entries, name = built.arrays(), self._arrays, self._spec.name
        found: list[tuple[str, tuple[int, int], Tensor]] = []
        for array, tensor in arrays.items():
            wanted = index_array_entry(name, array, len(self._layers), tensor.shape, dtype_name(tensor.dtype))
            if array not in entries:
                entries[array] = create(self._writer, wanted)
            if entries[array] != wanted:
                raise InvalidArgumentError(
                    f"index {name}: array {array} is {tuple(tensor.shape)} {wanted.dtype} in one layer and "
                    f"{entries[array].shape[1:]} {entries[array].dtype} in another; every layer must be alike"
                )
            found += [(wanted.path, (row, head), head_tensor) for head, head_tensor in enumerate(tensor)]
        if set(arrays) != set(entries):
            raise InvalidArgumentError(f"index {name}: layers have different arrays, {sorted(arrays)} here")
        return found

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


def create(writer: ContextWriter, entry: ArrayEntry) -> ArrayEntry:
    """Creates the array that an entry describes."""
    return writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)


def check_finite(kv_HN2D: Tensor, layer: int) -> None:
    """Raises InvalidArgumentError when a stored key or value is NaN or infinite."""
    if not all_finite(kv_HN2D):
        raise InvalidArgumentError(
            f"keys or values of layer {layer} are not finite in {dtype_name(kv_HN2D.dtype)}; "
            "store them with --dtype bfloat16 or float32"
        )


def calibrate(calibrator: ThresholdCalibrator, index: LayerIndex, source: LayerSource, sinks: int) -> None:
    """Adds one layer's late queries, each of which searches the keys between the sinks and its recent window.

    A request's window holds its own tokens, a late query's the end of the context: left out, both see the rest alike.
    With the window the thresholds come out so low that questions keep up to twice the wanted share.
    """
    _, token_count, _, head_dim = source.kv_HN2D.shape
    if token_count <= sinks:
        return
    queries, positions_P = source.queries.queries_HPGD, source.queries.positions_P
    rows_R = late_rows(positions_P, token_count)
    for part in _runs(positions_P[rows_R]):
        scaled = queries[:, rows_R[part]] * head_dim**-0.5
        position = int(positions_P[rows_R[part.start]])
        end = min(token_count, position - _RECENT)
        if end < sinks + token_count // 2:  # a short context is searched whole
            end = token_count
        calibrator.add(index.rank(scaled, sinks, end, None, {}, position=position))


def _runs(positions_R: Tensor) -> Iterator[slice]:
    """Slices of consecutive positions, of at most 16 each."""
    first = 0
    for row in range(1, len(positions_R) + 1):
        ends = row == len(positions_R) or int(positions_R[row]) != int(positions_R[row - 1]) + 1
        if ends or row - first == _ROWS_AT_ONCE:
            yield slice(first, row)
            first = row
