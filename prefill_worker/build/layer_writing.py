"""From the rows of every layer to arrays in the store: one layer is built while others are written.

Rows are what a model's reading of the document has left (`Capture`), or what the store has (`StoredRows`).

On a device indexes are built on a stream of their own, in a thread of their own; finished chunks go to threads that
copy them into page-locked memory, compute their checksums and write them. At most two layers are under way. On a CPU,
where building takes all cores, only the writing is beside it.

Shape legend: H KV heads, N keys, R rows of the query sample, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from index_store.attention.logit_form import LogitForm
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.interface.layer_index import ClusterStarts, LayerIndex, LayerSource
from index_store.indexes.row_planes.two_planes import find_low_plane
from index_store.methods.index_specs import IndexSpec
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import AS_DTYPE
from index_store.store.description.manifest import HIGH_PLANE, IndexEntry
from index_store.store.stored_context import QuerySample
from index_store.store.writer import ContextWriter
from prefill_worker.build.dense_layers import EXACT, Selectivity, measure_selectivity
from prefill_worker.build.layer_arrays import CapturedWriting, Chunk, IndexWriting, check_finite
from prefill_worker.build.layer_records import KeptChunk, LayerKeeper, LayerRecord
from prefill_worker.build.stages import BuildStream, ChunkWriting, Stage, Timer
from prefill_worker.reading.capture import Capture

UNDER_WAY = 2
"""Layers that are built or written at a time."""

WRITERS = 4
"""Threads that copy, compute checksums and write."""


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
        keeper: LayerKeeper | None = None,
    ) -> None:
        """inverse_frequencies: [d/2] of the rotary embedding, where it has that form. overlap: False: no threads.

        keeper: keeps records of the layers, and has those of layers that need not be built again.
        """
        self._writer = writer
        self._keeper = keeper
        self._kept: dict[int, LayerRecord] = {}
        self._chunks_of: dict[int, list[tuple[str, tuple[int, int]]]] = {}
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
        self,
        indexes: Sequence[IndexSpec],
        capture: Capture | None = None,
        measure: bool = False,
        rows: str = AS_DTYPE,
    ) -> None:
        """Says what is written; comes before the first `add`.

        capture: whose keys, values and queries are written, too; None where the store has them. measure: find out on
        the way how selective the attention of every layer is. rows: how those of a capture are written, one of
        `ROW_CODINGS`; in 8 bits the index HIGH_PLANE is among the indexes.
        """
        full_layers = self._rows.identity.full_layers
        self._indexes = [IndexWriting(self._writer, spec, full_layers, self._seed) for spec in indexes]
        self._measure = measure
        self._captured = None if capture is None else CapturedWriting(self._writer, capture, rows)
        for layer, record in {} if self._keeper is None else self._keeper.records().items():
            if self._adopt(layer, record):
                self._kept[layer] = record

    @property
    def adopted(self) -> int:
        """Layers that were there already when this began."""
        return len(self._kept)

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
            if self._keeper is not None and layer not in self._kept:
                self._keeper.keep_layer(layer, self._record(layer))
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

    def _adopt(self, layer: int, record: LayerRecord) -> bool:
        """Whether all of a layer is there as it was written; it counts as written then."""
        for index in self._indexes:
            index.expect(record.arrays.get(index.name, ()))
        try:
            whole = all(self._writer.adopt_chunk(*astuple(chunk)) for chunk in record.chunks)
        except KeyError:  # a chunk of an array that is not wanted any more
            return False
        if whole:
            for index in self._indexes:
                index.count(layer, *record.counts[index.name])
            if record.selectivity is not None:
                self._measured[layer] = record.selectivity
        return whole

    def _record(self, layer: int) -> LayerRecord:
        chunks = self._chunks_of.pop(layer)
        return LayerRecord(
            tuple(KeptChunk(path, place, self._writer.checksum(path, place)) for path, place in chunks),
            {index.name: index.kept_arrays() for index in self._indexes},
            {index.name: index.counts(layer) for index in self._indexes},
            self._measured.get(layer),
        )

    def _submit(self, layer: int, path: str, indices: tuple[int, int], chunk: Tensor) -> None:
        self._chunks_of.setdefault(layer, []).append((path, indices))
        self._writes[layer].append(self._chunks.submit(path, indices, chunk))

    def _build(self, layer: int) -> None:
        self._ready[layer]()
        if layer in self._kept:
            return
        rows, captured = self._rows, self._captured
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
            self._submit(layer, path, indices, chunk)
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
            built = index.build(layer, source, form, self._timer, self._stream)
            chunks = index.chunks(layer, built)
            if captured is not None and captured.in_planes and index.name == HIGH_PLANE:
                chunks += self._low_chunks(captured, layer, kv_HN2D, built)
            for path, indices, chunk in chunks:
                self._submit(layer, path, indices, chunk)

    def _low_chunks(
        self, captured: CapturedWriting, layer: int, kv_HN2D: Tensor, built: LayerIndex
    ) -> list[Chunk]:
        """Those of the low plane beside the high one."""
        if not isinstance(built, CoarseRows):
            raise TypeError(f"index {HIGH_PLANE} is a {type(built).__name__}")
        with self._timer("index"), self._stream.running():
            return captured.plane_chunks(layer, find_low_plane(kv_HN2D, built.scalars))
