"""From the rows of every layer to arrays in the store: one layer is built while others are written.

Rows are what a model's reading of the document has left (`Capture`), or what the store has (`StoredRows`).

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
from typing import Protocol, Self

import torch
from torch import Tensor

from index_store.attention.logit_form import PLAIN, LogitForm
from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.layer_index import ClusterStarts, LayerIndex, LayerSource, all_finite
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.index_specs import IndexSpec
from index_store.selection.calibration import ThresholdCalibrator
from index_store.store.context_id import ModelIdentity
from index_store.store.dtypes import dtype_name
from index_store.store.manifest import (
    ArrayEntry,
    IndexEntry,
    index_array_entry,
    kv_entry,
    queries_entry,
    window_entry,
)
from index_store.store.stored_context import QuerySample
from index_store.store.writer import ContextWriter
from prefill_worker.build.dense_layers import EXACT, Selectivity, measure_selectivity
from prefill_worker.build.stages import BuildStream, ChunkWriting, Stage, Timer
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.query_sample import late_rows, stored_rows

UNDER_WAY = 2
"""Layers that are built or written at a time."""

WRITERS = 4
"""Threads that copy, compute checksums and write."""

_ROWS_AT_ONCE = 16
_RECENT = 64


class LayerRows(Protocol):
    """Keys, values and sampled queries of every layer that indexes are built for: those whose queries see all keys."""

    @property
    def identity(self) -> ModelIdentity: ...

    @property
    def device(self) -> torch.device:
        """Where indexes are built."""
        ...

    def kv_on_device(self, layer: int) -> Tensor:
        """[H, N, 2, d] in the stored dtype."""
        ...

    def query_sample(self, layer: int) -> QuerySample: ...

    def cluster_starts(self, layer: int) -> ClusterStarts | None: ...

    def form(self, layer: int) -> LogitForm:
        """What the layer does to logits."""
        ...

    def release(self, layer: int) -> None:
        """Frees what is kept of a layer."""
        ...


@dataclass(frozen=True, slots=True)
class WrittenLayers:
    """What the manifest says about the layers that were written.

    queries, query_positions: None and empty where the rows themselves were not written. selectivity: of every layer,
    where it was to be measured.
    """

    indexes: tuple[IndexEntry, ...]
    queries: ArrayEntry | None
    query_positions: tuple[int, ...]
    selectivity: tuple[Selectivity, ...]


class LayerWriting:
    """Builds and writes all layers, and frees the rows of each when it is written. Use as a context manager.

    Layers are added in order as soon as the model has passed them. Leaving the block before `finish` has returned
    drops what has not begun and waits for what has.
    """

    def __init__(
        self,
        writer: ContextWriter,
        rows: LayerRows,
        inverse_frequencies: Tensor | None,
        seed: int,
        timer: Timer,
        overlap: bool = True,
    ) -> None:
        """inverse_frequencies: [d/2] of the rotary embedding, where it has that form. overlap: False: no threads."""
        self._writer = writer
        self._rows = rows
        self._frequencies = inverse_frequencies
        self._seed = seed
        self._timer = timer
        self._stages = ExitStack()
        on_device = rows.device.type == "cuda"
        self._building = Stage(1 if overlap and on_device else 0, "build")
        self._chunk_stage = Stage(WRITERS if overlap else 0, "write")
        self._chunks = ChunkWriting(writer, self._chunk_stage, timer)
        self._stream = BuildStream(rows.device)
        self._stopped = False
        self._ready: list[Callable[[], None]] = []
        self._built: list[Future[None]] = []
        self._writes: list[list[Future[None]]] = []
        self._written = 0
        self._measured: dict[int, Selectivity] = {}

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
        self, indexes: Sequence[IndexSpec], capture: Capture | None = None, measure: bool = False
    ) -> None:
        """Says what is written; comes before the first `add`.

        capture: whose keys, values and queries are written, too; None where the store has them. measure: find out on
        the way how selective the attention of every layer is.
        """
        full_layers = self._rows.identity.full_layers
        self._indexes = [IndexWriting(self._writer, spec, full_layers, self._seed) for spec in indexes]
        self._measure = measure
        self._captured = None if capture is None else CapturedWriting(self._writer, capture)

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
        layers = self._rows.identity.layers
        for layer in range(layers):
            while len(self._ready) < min(layers, layer + UNDER_WAY):
                self.add(len(self._ready))
            self._built[layer].result()
            for write in self._writes[layer]:
                write.result()
            self._writes[layer].clear()
            self._rows.release(layer)
            self._written += 1
            self._proceed()
            progress(self._written, layers)
        captured = self._captured
        return WrittenLayers(
            tuple(index.entry() for index in self._indexes),
            None if captured is None else captured.queries,
            () if captured is None else captured.positions,
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
        writes, rows, captured = self._writes[layer], self._rows, self._captured
        searched = layer in rows.identity.full_layers
        if captured is not None or searched:
            with self._stream.running():
                kv_HN2D = rows.kv_on_device(layer)
                check_finite(kv_HN2D, layer)
        sample = None
        if searched:
            with self._stream.running():
                sample, starts = rows.query_sample(layer), rows.cluster_starts(layer)
            source = LayerSource(kv_HN2D, sample, self._frequencies, starts)
        for path, indices, chunk in [] if captured is None else captured.chunks(layer, sample):
            writes.append(self._chunks.submit(path, indices, chunk))
        if sample is None:
            if self._measure:
                self._measured[layer] = EXACT
            return
        form = rows.form(layer)
        if self._measure:
            with self._timer("dense_layers"), self._stream.running():
                self._measured[layer] = measure_selectivity(kv_HN2D, sample, form)
        for index in self._indexes:
            if self._stopped:
                return
            built = index.build(source, form, self._timer, self._stream)
            for path, indices, chunk in index.chunks(layer, built):
                writes.append(self._chunks.submit(path, indices, chunk))


Chunk = tuple[str, tuple[int, int], Tensor]
"""Path, place and contents of one chunk."""


class CapturedWriting:
    """The captured keys, values and queries on their way into the store: the queries as far as they are stored."""

    def __init__(self, writer: ContextWriter, capture: Capture) -> None:
        self._capture = capture
        model = capture.identity
        made = (model, capture.token_count, dtype_name(capture.kv_dtype))
        window = window_entry(*made)
        self._kv = create(writer, kv_entry(*made))
        self._window = self._kv if window is None else create(writer, window)
        positions_P = capture.sample_positions
        self._rows_P = stored_rows(positions_P, capture.token_count)
        queries = queries_entry(model, len(self._rows_P))
        self.queries = None if queries is None else create(writer, queries)
        self.positions = () if queries is None else tuple(positions_P[self._rows_P].tolist())

    def chunks(self, layer: int, sample: QuerySample | None) -> list[Chunk]:
        """Those of one layer. sample: None of a layer with a sliding window."""
        model = self._capture.identity
        windowed = layer in model.window_layers
        place = (model.window_layers if windowed else model.full_layers).index(layer)
        arrays = [(self._window if windowed else self._kv, self._capture.kv(layer))]
        if sample is not None and self.queries is not None:
            arrays.append((self.queries, sample.queries_HPGD[:, self._rows_P]))
        return [
            (entry.path, (place, head), chunk) for entry, data in arrays for head, chunk in enumerate(data)
        ]


class IndexWriting:
    """One index on its way into the store, layer after layer."""

    def __init__(self, writer: ContextWriter, spec: IndexSpec, layers: tuple[int, ...], seed: int) -> None:
        """layers: those that the index covers."""
        self._writer = writer
        self._spec = spec
        self._layers = layers
        self._seed = seed
        self._arrays: dict[str, ArrayEntry] = {}
        self._calibrator = ThresholdCalibrator()

    def build(self, source: LayerSource, form: LogitForm, timer: Timer, stream: BuildStream) -> LayerIndex:
        """Builds and calibrates the index of a layer."""
        kind = INDEX_KINDS[self._spec.kind]
        with timer("index"), stream.running():
            built = kind.build(self._spec.parameters, source, self._seed)
        if kind.partitions:
            with timer("thresholds"), stream.running():
                calibrate(self._calibrator, built, source, int(self._spec.parameters.get("sinks", 0)), form)
        return built

    def chunks(self, layer: int, built: LayerIndex) -> list[Chunk]:
        """Those of one layer, in arrays that the first layer creates."""
        row = self._layers.index(layer)
        arrays, entries, name = built.arrays(), self._arrays, self._spec.name
        found: list[Chunk] = []
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


def calibrate(
    calibrator: ThresholdCalibrator,
    index: LayerIndex,
    source: LayerSource,
    sinks: int,
    form: LogitForm = PLAIN,
) -> None:
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
        calibrator.add(index.rank(scaled, sinks, end, None, {}, position=position).capped(form))


def _runs(positions_R: Tensor) -> Iterator[slice]:
    """Slices of consecutive positions, of at most 16 each."""
    first = 0
    for row in range(1, len(positions_R) + 1):
        ends = row == len(positions_R) or int(positions_R[row]) != int(positions_R[row - 1]) + 1
        if ends or row - first == _ROWS_AT_ONCE:
            yield slice(first, row)
            first = row
