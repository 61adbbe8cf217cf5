"""Decode steps of any sessions on a GPU: sorts them into batches that one graph can run, and keeps the graphs."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from decode_engine.dense_layer import DenseLayer
from decode_engine.device.dense_steps import DenseSteps
from decode_engine.device.registry import step_attention_for
from decode_engine.device.step_attention import StepAttention, StepPlan
from decode_engine.device.step_batch import StepBatch, step_counts
from decode_engine.device.step_graph import Captures, Choice, StepGraph, StepModel, Stepped
from decode_engine.kernels import records
from decode_engine.sampler import Sampler, SamplingParameters
from decode_engine.session import Session, is_dense
from decode_engine.stepping import advance
from index_store.context import ResidentContext
from index_store.dtypes import stored_dtype
from index_store.errors import SparseKVError
from index_store.index_specs import IndexSpec
from index_store.manifest import Manifest, ModelIdentity
from index_store.methods import Method
from index_store.placement import Placement

MAX_ROWS = 32
_LEAST_KEYS = 2**12
_GRAPHS = 48

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Batchable:
    """What kind of batch a session runs in.

    key: equal for sessions that share one: whatever kernels depend on but the contexts' lengths. max_keys: of a batch
    for this session alone; one for several is as long as the longest needs.
    """

    key: Hashable
    layers: tuple[type[StepAttention], ...]
    max_keys: int


class Stepper:
    """Runs decode steps through captured graphs. One thread uses it.

    A batch's size is rounded up to a power of two, and its graph captured when a batch of that kind and size first
    comes; the graphs used longest ago are dropped.
    """

    def __init__(
        self,
        model: StepModel,
        identity: ModelIdentity,
        dtype: torch.dtype,
        device: torch.device,
        *,
        dense: type[StepAttention] = DenseSteps,
    ) -> None:
        """dtype: in which the model computes. dense: attends to everything; a benchmark may put in something else."""
        self._model = model
        self._dense = dense
        self._identity = identity
        self._dtype = dtype
        self._device = device
        self._captures = Captures(device) if device.type == "cuda" else None
        self._graphs: OrderedDict[Hashable, StepGraph] = OrderedDict()
        self._sorted: WeakKeyDictionary[Session, _Batchable | str] = WeakKeyDictionary()
        self._refused: set[tuple[str, str]] = set()

    def prepare(
        self, method: Method, manifest: Manifest, sessions: int, placement: Placement = Placement.DEVICE
    ) -> None:
        """Captures greedy steps of up to `sessions` sessions on such a context, and compiles what the model compiles.

        method: as it runs over the context (`session.fit_method`). placement: of the context. Does nothing for a method
        without kernels.
        """
        kind = self._sort(method, manifest, placement)
        if isinstance(kind, _Batchable):
            for size in (2**n for n in range(_size(min(sessions, MAX_ROWS)).bit_length())):
                self._graph(kind, method, size, kind.max_keys, 0).prepare(Choice.GREEDY)

    def takes(self, session: Session) -> bool:
        """Whether the session's steps can run here; a reason why not is logged once per method."""
        return isinstance(self._kind(session), _Batchable)

    def step(
        self, sessions: Sequence[Session], tokens: Sequence[int], samplers: Sequence[Sampler]
    ) -> list[int | Exception]:
        """One step of every session, all of which are such as `takes` says yes to.

        Returns the chosen tokens. Sessions of a batch that fails, one that finds no room in it, and one whose logits
        are not finite get an error instead and do not advance.
        """
        results: list[int | Exception] = [SparseKVError("the step did not run")] * len(sessions)
        groups: dict[Hashable, list[int]] = {}
        for number, session in enumerate(sessions):
            groups.setdefault(self._required(session).key, []).append(number)
        for numbers in groups.values():
            for first in range(0, len(numbers), MAX_ROWS):
                part = numbers[first : first + MAX_ROWS]
                chosen: Sequence[int | Exception]
                try:
                    chosen = self._step_together(
                        [sessions[i] for i in part],
                        [tokens[i] for i in part],
                        [samplers[i] for i in part],
                        first // MAX_ROWS,
                    )
                except Exception as error:  # other batches may have advanced: it is these sessions' own
                    logger.exception("a batch of %d sessions failed", len(part))
                    chosen = [error] * len(part)
                for number, result in zip(part, chosen, strict=True):
                    results[number] = result
        return results

    def feed(self, session: Session, token: int) -> Tensor:
        """One step of one session such as `takes` says yes to, whatever comes next: float32 logits [1, V]."""
        greedy = [Sampler(SamplingParameters())]
        (result,) = self.step([session], [token], greedy)
        if isinstance(result, Exception):
            raise result
        return self.graph([session]).logits_BV[:1].float().clone()

    def graph(self, sessions: Sequence[Session], part: int = 0) -> StepGraph:
        """What steps of these sessions, which agree in kind, run in.

        part: of the sessions of a kind, where they are too many for one batch. Every part has its own, so that its
        sessions keep their rows.
        """
        kind = self._required(sessions[0])
        max_keys = max(self._required(session).max_keys for session in sessions)
        return self._graph(kind, sessions[0].effective_method, _size(len(sessions)), max_keys, part)

    def _required(self, session: Session) -> _Batchable:
        """The kind of batch that the session goes into. Raises SparseKVError when it cannot run in any."""
        kind = self._kind(session)
        if not isinstance(kind, _Batchable):
            raise SparseKVError(f"method {session.method.name!r} cannot run in a graph: {kind}")
        return kind

    def _kind(self, session: Session) -> _Batchable | str:
        """What `_sort` says, which never changes. Waits until all of the session's context is in memory."""
        kind = self._sorted.get(session)
        if kind is None:
            context = session.context
            reason = unreadable(context, self._device)
            if reason is None:
                kind = self._sort(session.effective_method, context.manifest, context.placement)
            else:
                self._log_refusal(session.method.name, reason)
                kind = reason
            self._sorted[session] = kind
        return kind

    def _sort(self, method: Method, manifest: Manifest, placement: Placement) -> _Batchable | str:
        """The kind of batch that sessions go into, or why they cannot run in any."""
        reason: str | None = None
        searching: type[StepAttention] | str = self._dense
        if stored_dtype(manifest.dtype).torch_dtype != self._dtype:
            reason = f"keys and values are {manifest.dtype}, the model computes in {self._dtype}"
        elif method.schedule.by_step or method.schedule.ahead:
            reason = "its schedule uses selections of other steps"
        else:
            reason = self._dense.refusal(method, manifest)
        if reason is None and method.sparse:
            searching = step_attention_for(method, manifest, placement)
            reason = searching if isinstance(searching, str) else None
        if reason is not None or isinstance(searching, str):
            self._log_refusal(method.name, str(reason))
            return str(reason)
        layers = tuple(
            self._dense if is_dense(manifest, method, layer) else searching
            for layer in range(manifest.model.layers)
        )
        max_keys = max(_LEAST_KEYS, 1 << (manifest.token_count - 1).bit_length())
        parts = (method.remainder.name, tuple(sorted(method.search.items())))
        key = (placement, layers, _spec_key(method.index), _spec_key(method.partition), parts)
        return _Batchable(key, layers, max_keys)

    def _log_refusal(self, method: str, reason: str) -> None:
        if (method, reason) not in self._refused:
            self._refused.add((method, reason))
            logger.info("method %s decodes step by step without a graph: %s", method, reason)

    def _step_together(
        self, sessions: Sequence[Session], tokens: Sequence[int], samplers: Sequence[Sampler], part: int
    ) -> list[int | Exception]:
        """One replay. part: of the sessions of a kind, where they are too many for one batch."""
        graph = self.graph(sessions, part)
        seats = _seat(graph.batch, sessions)
        results: list[int | Exception] = [seat if isinstance(seat, Exception) else -1 for seat in seats]
        rows = {number: seat for number, seat in enumerate(seats) if isinstance(seat, int)}
        if not rows:
            return results
        steps = graph.step(list(rows.values()), [tokens[i] for i in rows], [samplers[i] for i in rows])
        for number, stepped in zip(rows, steps, strict=True):
            result = results[number] = advance(samplers[number], stepped.token)
            if not isinstance(result, Exception):
                _count(sessions[number], stepped)
                sessions[number].advance()
        return results

    def _graph(self, kind: _Batchable, method: Method, size: int, max_keys: int, part: int) -> StepGraph:
        key = (kind.key, size, max_keys, part)
        graph = self._graphs.pop(key, None)
        if graph is None:
            while len(self._graphs) >= _GRAPHS:
                self._graphs.popitem(last=False)
            plan = StepPlan(self._identity, method, size, max_keys, self._dtype, self._device)
            begin = time.perf_counter()
            graph = StepGraph(self._model, StepBatch(plan, kind.layers), self._captures)
            graph.prepare(Choice.GREEDY)
            logger.info(
                "steps of %d sessions of method %s on up to %d tokens are ready, in %.1f s",
                size,
                method.name,
                max_keys,
                time.perf_counter() - begin,
            )
        self._graphs[key] = graph
        return graph


def _size(count: int) -> int:
    """Rows of a batch for so many sessions."""
    return 1 << (count - 1).bit_length()


def unreadable(context: ResidentContext, device: torch.device) -> str | None:
    """Why kernels on the device cannot read the context, as a clause; None when they can.

    Waits until all layers are in memory, and raises the error that loading raised.
    """
    own = context.device
    if own.type != device.type or (None not in (own.index, device.index) and own.index != device.index):
        return f"its context is for {own}, the model on {device}"
    context.wait_for_layers()
    if device.type != "cuda" or context.placement is Placement.DEVICE:
        return None
    for layer in range(context.manifest.model.layers):
        if not context.kv(layer).is_pinned():
            return f"keys and values of layer {layer} are in host memory that is not page-locked"
    return None


def _spec_key(spec: IndexSpec | None) -> Hashable:
    return None if spec is None else (spec.name, spec.kind, tuple(sorted(spec.parameters.items())))


def _seat(batch: StepBatch, sessions: Sequence[Session]) -> list[int | Exception]:
    """Rows of the sessions: those that sit keep their row, others leave, new ones take free rows.

    One that there is no memory for, or that cannot be placed, gets the error instead; that is not the others' fault.
    """
    wanted = {id(session) for session in sessions}
    for row, session in enumerate(batch.sessions):
        if session is not None and id(session) not in wanted:
            batch.clear(row)
    seated = {id(session): row for row, session in enumerate(batch.sessions) if session is not None}
    free = [row for row, session in enumerate(batch.sessions) if session is None]
    seats: list[int | Exception] = []
    for session in sessions:
        row = seated[id(session)] if id(session) in seated else free.pop(0)
        try:
            session.reserve_tail()
            if id(session) not in seated:
                batch.place(row, session)
        except Exception as error:
            logger.exception("a session of method %s has no place in a batch", session.method.name)
            batch.clear(row)
            seats.append(error)
        else:
            seats.append(row)
    return seats


def _count(session: Session, stepped: Stepped) -> None:
    """Notes what the step touched in all layers."""
    manifest, available, figures = session.context.manifest, session.position + 1, session.figures
    heads = manifest.model.kv_heads
    searching = sum(not isinstance(layer, DenseLayer) for layer in session.layers)
    dense = len(session.layers) - searching
    figures.count_dense(heads * available * dense)
    if session.context.placement is not Placement.DEVICE:
        row_bytes = 2 * manifest.model.head_dim * stored_dtype(manifest.dtype).torch_dtype.itemsize
        rows = stepped.host_rows + dense * heads * manifest.token_count
        figures.host_bytes_read += rows * row_bytes
        figures.rows_reused += stepped.rows_reused
    if searching:
        counts = step_counts(session)
        searched = counts[records.END] - counts[records.FIRST]
        figures.count_exact(heads * searching * (available - searched), heads * searching * available)
        figures.count_kept(stepped.kept)
        figures.searches += searching if searched else 0
