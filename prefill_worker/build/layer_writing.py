"""From the rows of every layer to arrays in the store, while the model reads on.

Rows are what a model's reading of the document leaves (`Capture`), or what the store has (`StoredRows`).

Keys and values are final when a pass has left a layer, and are written then, each to its place in the file of its head.
Once the last pass has left a layer, its indexes are built and written. Threads copy what is on a device into memory
with locked pages, compute checksums and write. On a device indexes are built on a stream and in a thread of their own,
with at most two layers under way. On a CPU, where building takes all cores, it begins after the reading, and only the
writing is beside it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from index_store.attention.attention_state import LogitForm
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.two_planes import find_low_plane
from index_store.indexes.interface.layer_index import ClusterStarts, LayerIndex, LayerSource
from index_store.methods.method import IndexSpec
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import AS_DTYPE
from index_store.store.description.manifest import HIGH_PLANE, IndexEntry
from index_store.store.files.reading import file_threads
from index_store.store.stored_context import QuerySample
from index_store.store.writer import ContextWriter
from prefill_worker.build.dense_layers import EXACT, Selectivity, measure_selectivity
from prefill_worker.build.layer_arrays import CapturedWriting, IndexWriting, check_finite
from prefill_worker.build.layer_records import KeptChunk, LayerKeeper, LayerRecord
from prefill_worker.build.stages import BuildStream, Chunk, ChunkWriting, Stage, Timer
from prefill_worker.reading.capture import Capture

UNDER_WAY = 2
"""Layers that are built or written at a time."""


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
        self._chunks_of: dict[int, list[tuple[str, tuple[int, int]]]] = defaultdict(list)
        self._rows = rows
        self._frequencies = inverse_frequencies
        self._seed = seed
        self._timer = timer
        self._stages = ExitStack()
        on_device = rows.device.type == "cuda"
        self._building = Stage(1 if overlap and on_device else 0, "build")
        self._writing = ChunkWriting(writer, file_threads() if overlap else 0, timer)
        self._stream = BuildStream(rows.device)
        self._stopped = False
        self._captured: CapturedWriting | None = None
        self._ready: list[Callable[[], None]] = []
        self._built: list[Future[None]] = []
        self._writes: dict[int, deque[Future[None]]] = defaultdict(deque)
        self._submitted = 0
        self._written = 0
        self._measured: dict[int, Selectivity] = {}

    def __enter__(self) -> Self:
        self._stages.enter_context(self._writing)
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
        """Says what is written; comes before all else.

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

    def passed(self, layer: int, start: int, count: int) -> None:
        """Tokens start..start+count-1 of a capture have left the layer: their keys and values are written from here on.

        They are final once what the capture was asked for is done; passes come in order. Raises what an earlier write
        of the layer raised.
        """
        captured, writes = self._captured, self._writes[layer]
        if captured is None or layer in self._kept:
            return
        while writes and writes[0].done():
            writes.popleft().result()
        chunks = captured.rows(layer, start, count)
        if chunks:
            self._note_chunks(layer, chunks if start == 0 else [])
            writes.append(self._writing.submit(layer, captured.settled(), chunks, start))

    @property
    def adopted(self) -> int:
        """Layers that were there already when this began."""
        return len(self._kept)

    def add(self, layer: int) -> None:
        """The layer can be built: all is complete once what the caller's stream was asked for is done."""
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
            for write in self._writes.pop(layer, ()):
                write.result()
            if self._keeper is not None and layer not in self._kept:
                self._keeper.keep_layer(layer, self._record(layer))
            self._rows.release(layer)
            self._written += 1
            self._proceed()
            progress(self._written, layers)
        captured = self._captured
        if captured is not None:
            self._writer.write_state(captured.state())
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

    def _submit(self, layer: int, chunks: Sequence[Chunk]) -> None:
        """Has whole chunks written, which are complete, by any threads."""
        self._note_chunks(layer, chunks)
        for chunk in chunks:
            self._submitted += 1
            self._writes[layer].append(self._writing.submit(self._submitted, _at_once, [chunk]))

    def _note_chunks(self, layer: int, chunks: Sequence[Chunk]) -> None:
        if self._keeper is not None:
            self._chunks_of[layer] += [(path, indices) for path, indices, _ in chunks]

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
        if captured is not None:
            with self._stream.running():  # which chunks wait for: they are copied by other streams
                chunks = captured.chunks(layer, sample)
            self._submit(layer, chunks)
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
            with self._stream.running():
                chunks = index.chunks(layer, built)
            if captured is not None and captured.in_planes and index.name == HIGH_PLANE:
                chunks += self._low_chunks(captured, layer, kv_HN2D, built)
            self._submit(layer, chunks)

    def _low_chunks(
        self, captured: CapturedWriting, layer: int, kv_HN2D: Tensor, built: LayerIndex
    ) -> list[Chunk]:
        """Those of the low plane beside the high one."""
        if not isinstance(built, CoarseRows):
            raise TypeError(f"index {HIGH_PLANE} is a {type(built).__name__}")
        with self._timer("index"), self._stream.running():
            return captured.plane_chunks(layer, find_low_plane(kv_HN2D, built.rows))


def _at_once() -> None:
    """Of what is complete already."""
