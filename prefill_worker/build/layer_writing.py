"""From the rows of every layer to arrays in the store, while the model reads on.

Rows are what a model's reading of the document leaves (`Capture`), or what the store has (`StoredRows`).

Keys and values are final when a pass has left a layer, and are written then, each to its place in the file of its head.
Once the last pass has left a layer, its indexes are built and written. Threads copy what is on a device into memory
with locked pages, compute checksums and write. On a device indexes are built on a stream and in a thread of their own,
with at most two layers under way. On a CPU, where building takes all cores, it begins after the reading, and only the
writing is beside it.

Shape legend: H KV heads, G query heads per KV head, N tokens of the context, P sampled tokens, R rows of the query
sample, d head dim.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import Self

import torch
from torch import Tensor

from index_store.attention.attention_state import PLAIN, LogitForm
from index_store.errors import InvalidArgumentError
from index_store.indexes.classes import INDEX_CLASSES
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.two_planes import find_low_plane, read_rows
from index_store.indexes.interface.layer_index import LayerIndex, LayerSource, all_finite
from index_store.methods.method import IndexSpec
from index_store.selection.budgets import CLUSTERS
from index_store.selection.calibration import ThresholdCalibrator
from index_store.store.description.array_entry import (
    ArrayEntry,
    index_array_entry,
    kv_entry,
    plane_entry,
    queries_entry,
    window_entry,
)
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import AS_DTYPE, INT8, dtype_name
from index_store.store.description.manifest import HIGH_PLANE, IndexEntry
from index_store.store.files.reading import file_threads
from index_store.store.stored_context import Context, QuerySample
from index_store.store.writer import ContextWriter
from prefill_worker.build.checkpoint import Checkpoint, KeptArray, KeptChunk, LayerRecord
from prefill_worker.build.dense_layers import EXACT, Selectivity, measure_selectivity
from prefill_worker.build.stages import BuildStream, Chunk, ChunkWriting, Stage, Timer
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.query_sample import late_rows, stored_rows

LOGIT_CAP = "logit_cap"
"""Note of a manifest: the soft cap of the model's attention logits, where it has one."""


class StoredRows:
    """Keys and values as they are stored, and queries: the few that are stored, or all that a second reading sampled.

    So what is added fits the stored keys bit for bit, whatever a second reading's rounding makes of them.
    """

    def __init__(self, context: Context, device: torch.device, read_again: Capture | None = None) -> None:
        """The context must stay open."""
        self.identity: ModelIdentity = context.manifest.model
        self.device = device
        self._context = context
        self._read_again = read_again

    def kv_on_device(self, layer: int) -> Tensor:
        """[H, N, 2, d] as `read_rows` has them."""
        return read_rows(self._context, layer).to(self.device)

    def query_sample(self, layer: int) -> QuerySample:
        """[H, P, G, d]; of a context without stored queries none."""
        if self._read_again is not None:
            return self._read_again.query_sample(layer)
        if self._context.manifest.queries is None:
            group = self.identity.query_heads // self.identity.kv_heads
            empty = torch.empty(self.identity.kv_heads, 0, group, self.identity.head_dim, device=self.device)
            return QuerySample(empty, torch.empty(0, dtype=torch.int64))
        stored = self._context.queries(layer)
        return QuerySample(stored.queries_HPGD.to(self.device), stored.positions_P)

    def form(self, layer: int) -> LogitForm:
        """What the layer does to logits, as far as indexes depend on it: its cap, which the manifest notes."""
        cap = self._context.manifest.prefill.get(LOGIT_CAP)
        return PLAIN if cap is None else LogitForm(float(cap))

    def release(self, layer: int) -> None:
        if self._read_again is not None:
            self._read_again.release(layer)


_ROWS_AT_ONCE = 16
_RECENT = 64


class CapturedWriting:
    """The captured keys, values and queries on their way into the store: the queries as far as they are stored."""

    def __init__(self, writer: ContextWriter, capture: Capture, rows: str) -> None:
        """rows: one of `ROW_CODINGS`."""
        self._capture = capture
        self.in_planes = rows == INT8
        model = capture.identity
        made = (model, capture.token_count, dtype_name(capture.kv_dtype))
        window = window_entry(*made)
        self._kv = create(writer, plane_entry(*made[:2]) if self.in_planes else kv_entry(*made))
        self._window = self._kv if window is None else create(writer, window)
        positions_P = capture.sample_positions
        self._rows_P = stored_rows(positions_P, capture.token_count)
        queries = queries_entry(model, len(self._rows_P))
        self.queries = None if queries is None else create(writer, queries)
        self.positions = () if queries is None else tuple(positions_P[self._rows_P].tolist())

    def rows(self, layer: int, start: int, count: int) -> list[Chunk]:
        """The layer's keys and values of tokens start..start+count-1, which are final; empty where those come later.

        Later come the last ones of a sliding window, and what is derived from all of them.
        """
        model = self._capture.identity
        if self.in_planes or layer in model.window_layers:
            return []
        kv_HN2D = self._capture.kv(layer)
        return self._placed(self._kv, model.full_layers.index(layer), kv_HN2D[:, start : start + count])

    def write_state(self, writer: ContextWriter) -> None:
        """Writes the states behind the last token and the marks, of a model with states."""
        last = self._capture.packed_state(self._capture.kv_dtype)
        writer.write_state(last, marks=self._capture.marked_states())

    def settled(self) -> Callable[[], None]:
        """What returns once all that has passed so far is where `rows` finds it."""
        return self._capture.settled()

    def chunks(self, layer: int, sample: QuerySample | None) -> list[Chunk]:
        """What is left of a layer once all rows have passed: a window, or the queries. sample: None with a window."""
        model = self._capture.identity
        if layer in model.window_layers:
            return self._placed(self._window, model.window_layers.index(layer), self._capture.kv(layer))
        if sample is None or self.queries is None:
            return []
        queries_HPGD = sample.queries_HPGD[:, self._rows_P]
        return self._placed(self.queries, model.full_layers.index(layer), queries_HPGD)

    def plane_chunks(self, layer: int, low_HN2C: Tensor) -> list[Chunk]:
        """Those of the low plane of a layer whose queries see all keys."""
        return self._placed(self._kv, self._capture.identity.full_layers.index(layer), low_HN2C)

    @staticmethod
    def _placed(entry: ArrayEntry, place: int, data: Tensor) -> list[Chunk]:
        return [(entry.path, (place, head), chunk) for head, chunk in enumerate(data)]


class IndexWriting:
    """One index on its way into the store, layer after layer."""

    def __init__(self, writer: ContextWriter, spec: IndexSpec, layers: tuple[int, ...], seed: int) -> None:
        """layers: those that the index covers."""
        self._writer = writer
        self._spec = spec
        self._layers = layers
        self._seed = seed
        self._arrays: dict[str, ArrayEntry] = {}
        self._calibrators: dict[int, ThresholdCalibrator] = {}

    @property
    def name(self) -> str:
        return self._spec.name

    def build(
        self, layer: int, source: LayerSource, form: LogitForm, timer: Timer, stream: BuildStream
    ) -> LayerIndex:
        """Builds and calibrates the index of a layer."""
        kind = INDEX_CLASSES[self._spec.kind]
        with timer("index"), stream.running():
            built = kind.build(self._spec.parameters, source, self._seed)
        if kind.divides_into is not None:
            with timer("thresholds"), stream.running():
                sinks = int(self._spec.parameters.get("sinks", 0))
                calibrate(self._calibrator(layer), built, source, sinks, form)
        return built

    def chunks(self, layer: int, built: LayerIndex) -> list[Chunk]:
        """Those of one layer, in arrays that the first layer creates."""
        row = self._layers.index(layer)
        arrays, entries, name = built.arrays(), self._arrays, self._spec.name
        found: list[Chunk] = []
        for array, tensor in arrays.items():
            wanted = self._expect(array, tensor.shape, dtype_name(tensor.dtype))
            if entries[array] != wanted:
                raise InvalidArgumentError(
                    f"index {name}: array {array} is {tuple(tensor.shape)} {wanted.dtype} in one layer and "
                    f"{entries[array].shape[1:]} {entries[array].dtype} in another; every layer must be alike"
                )
            found += [(wanted.path, (row, head), head_tensor) for head, head_tensor in enumerate(tensor)]
        if set(arrays) != set(entries):
            raise InvalidArgumentError(f"index {name}: layers have different arrays, {sorted(arrays)} here")
        return found

    def expect(self, arrays: Sequence[KeptArray]) -> None:
        """Makes the arrays that a layer has which was written before."""
        for array in arrays:
            self._expect(array.name, array.shape, array.dtype)

    def _expect(self, name: str, shape: Sequence[int], dtype: str) -> ArrayEntry:
        wanted = index_array_entry(self.name, name, len(self._layers), shape, dtype)
        if name not in self._arrays:
            self._arrays[name] = create(self._writer, wanted)
        return wanted

    def kept_arrays(self) -> tuple[KeptArray, ...]:
        return tuple(KeptArray(name, entry.shape[1:], entry.dtype) for name, entry in self._arrays.items())

    def count(self, layer: int, keys_B: Tensor, searched: int) -> None:
        """Takes what a layer that was written before had counted for the thresholds."""
        self._calibrator(layer).add_counts(keys_B, searched)

    def counts(self, layer: int) -> tuple[Tensor, int]:
        return self._calibrator(layer).counts

    def _calibrator(self, layer: int) -> ThresholdCalibrator:
        return self._calibrators.setdefault(layer, ThresholdCalibrator())

    def entry(self) -> IndexEntry:
        calibrator = ThresholdCalibrator()
        for layer in sorted(self._calibrators):
            calibrator.add_counts(*self._calibrators[layer].counts)
        return IndexEntry(
            self._spec.name,
            self._spec.kind,
            dict(self._spec.parameters),
            self._layers,
            tuple(self._arrays.values()),
            calibrator.thresholds,
        )


def create(writer: ContextWriter, entry: ArrayEntry) -> ArrayEntry:
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
    With the window the thresholds come out so low that questions keep up to twice the wanted share. Where single keys
    are ranked, one query in 16 does, so that as many are counted as of clusters.
    """
    _, token_count, _, head_dim = source.kv_HN2D.shape
    if token_count <= sinks:
        return
    queries, positions_P = source.queries.queries_HPGD, source.queries.positions_P
    rows_R = late_rows(positions_P, token_count)[:: _thinning(index)]
    for part in _runs(positions_P[rows_R]):
        scaled = queries[:, rows_R[part]] * head_dim**-0.5
        position = int(positions_P[rows_R[part.start]])
        end = min(token_count, position - _RECENT)
        if end < sinks + token_count // 2:  # a short context is searched whole
            end = token_count
        calibrator.add(index.rank(scaled, sinks, end, None, {}, position=position).capped(form))


def _thinning(index: LayerIndex) -> int:
    """Of how many late queries one calibrates."""
    ranked = index.divides_into
    return 1 if ranked is None else max(1, CLUSTERS.keys_each // ranked.keys_each)


def _runs(positions_R: Tensor) -> Iterator[slice]:
    """Slices of consecutive positions, of at most 16 each."""
    first = 0
    for row in range(1, len(positions_R) + 1):
        ends = row == len(positions_R) or int(positions_R[row]) != int(positions_R[row - 1]) + 1
        if ends or row - first == _ROWS_AT_ONCE:
            yield slice(first, row)
            first = row


UNDER_WAY = 2
"""Layers that are built or written at a time."""


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
        rows: Capture | StoredRows,
        inverse_frequencies: Tensor | None,
        seed: int,
        timer: Timer,
        overlap: bool = True,
        keeper: Checkpoint | None = None,
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

    def __exit__(self, *raised: object) -> None:
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
        searched = self._rows.identity.searched_layers
        self._indexes = [IndexWriting(self._writer, spec, searched, self._seed) for spec in indexes]
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
            captured.write_state(self._writer)
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
                sample = rows.query_sample(layer)
            source = LayerSource(kv_HN2D, sample, self._frequencies)
        if captured is not None:
            with self._stream.running():  # which chunks wait for: they are copied by other streams
                chunks = captured.chunks(layer, sample)
            self._submit(layer, chunks)
        if sample is None or layer not in rows.identity.searched_layers:
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
