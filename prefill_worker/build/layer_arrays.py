"""The arrays that layers are written to: captured keys, values and queries, and indexes with their thresholds.

Shape legend: H KV heads, N keys, R rows of the query sample, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from index_store.attention.attention_state import PLAIN, LogitForm
from index_store.errors import InvalidArgumentError
from index_store.indexes.classes import INDEX_CLASSES
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
from index_store.store.description.dtypes import INT8, dtype_name
from index_store.store.description.manifest import IndexEntry
from index_store.store.stored_context import QuerySample
from index_store.store.writer import ContextWriter
from prefill_worker.build.layer_records import KeptArray
from prefill_worker.build.stages import BuildStream, Chunk, Timer
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.query_sample import late_rows, stored_rows

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

    def state(self) -> Tensor | None:
        """Packed states behind the last token; None of a model without."""
        return self._capture.packed_state(self._capture.kv_dtype)

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
        """Of the index in the store."""
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
        """What `expect` takes."""
        return tuple(KeptArray(name, entry.shape[1:], entry.dtype) for name, entry in self._arrays.items())

    def count(self, layer: int, keys_B: Tensor, searched: int) -> None:
        """Takes what a layer that was written before had counted for the thresholds."""
        self._calibrator(layer).add_counts(keys_B, searched)

    def counts(self, layer: int) -> tuple[Tensor, int]:
        """What `count` takes."""
        return self._calibrator(layer).counts

    def _calibrator(self, layer: int) -> ThresholdCalibrator:
        return self._calibrators.setdefault(layer, ThresholdCalibrator())

    def entry(self) -> IndexEntry:
        """The finished index as the manifest describes it."""
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
