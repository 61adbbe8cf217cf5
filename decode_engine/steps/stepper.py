"""Decode steps of any sessions on a GPU: sorts them into batches that one graph can run, and keeps the graphs."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.stepping import advance
from decode_engine.host_search.turns_triton import Lane
from decode_engine.host_search.workers import SearchThreads
from decode_engine.layers.session import Session
from decode_engine.steps.attention.dense_steps import DenseSteps
from decode_engine.steps.attention.host_steps import HostSteps
from decode_engine.steps.attention.hybrid_steps import HybridSteps
from decode_engine.steps.attention.registry import step_attention_for, unreadable
from decode_engine.steps.attention.step_attention import StepAttention, StepPlan
from decode_engine.steps.attention.step_batch import StepBatch
from decode_engine.steps.step_graph import Captures, Choice, StepGraph, StepModel, Stepped
from index_store.errors import SparseKVError
from index_store.memory.placement import Placement
from index_store.methods.index_specs import IndexSpec
from index_store.methods.method import FittedMethod, Method
from index_store.store.dtypes import stored_dtype
from index_store.store.manifest import ModelIdentity

MAX_ROWS = 32
_LEAST_KEYS = 2**12
_GRAPHS = 48

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Batchable:
    """What kind of batch a session runs in.

    key: equal for sessions that share one: whatever kernels depend on but the contexts' lengths. searching: layers that
    do not attend to everything. row_bytes: of a key and its value in host memory, 0 where they are on the device.
    max_keys: of a batch for this session alone; one for several is as long as the longest needs.
    """

    key: int
    layers: tuple[type[StepAttention], ...]
    searching: int
    row_bytes: int
    max_keys: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Sessions that step in one graph. numbers: of theirs among the caller's. part, lane: see `Stepper.graph`."""

    kind: _Batchable
    numbers: Sequence[int]
    sessions: Sequence[Session]
    max_keys: int
    part: int
    lane: int


@dataclass(slots=True)
class _Launched:
    """A step of a part. rows: by place among its sessions."""

    of: _Part
    samplers: Sequence[Sampler]
    rows: dict[int, int] = field(default_factory=dict)
    graph: StepGraph | None = None


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
        searching: SearchThreads | None = None,
    ) -> None:
        """dtype: in which the model computes.

        searching: threads for contexts that are searched on the host, and lanes that batches over contexts in host
        memory are split into, so that one lane's rows are searched for and fetched while the device computes for the
        other; one thread and lane by default.
        """
        self._model = model
        self._identity = identity
        self._dtype = dtype
        self._device = device
        self._searching = searching or SearchThreads(1)
        self._turn_1 = torch.zeros(1, dtype=torch.int32, device=device)
        # Lanes run at once: each has graphs, memory and a stream of its own.
        self._captures = [
            Captures(device, lane) if device.type == "cuda" else None for lane in range(self._searching.lanes)
        ]
        self._graphs: OrderedDict[Hashable, StepGraph] = OrderedDict()
        self._keys: dict[Hashable, int] = {}
        # Of the sessions that came last: most steps are of the same ones as the step before.
        self._taken: tuple[list[Session], list[bool]] = ([], [])
        self._divided: tuple[list[Session], list[list[_Part]]] = ([], [])
        self._sorted: WeakKeyDictionary[Session, _Batchable | str] = WeakKeyDictionary()
        self._refused: set[tuple[str, str]] = set()

    def prepare(self, fitted: FittedMethod, sessions: int, placement: Placement = Placement.DEVICE) -> None:
        """Captures greedy steps of up to `sessions` sessions on such a context, and compiles what the model compiles.

        placement: of the context. Does nothing for a method without kernels.
        """
        kind = self._sort(fitted, placement)
        if isinstance(kind, _Batchable):
            lanes = self._lanes(kind)
            largest = _size(-(-min(sessions, MAX_ROWS) // lanes))
            for lane in range(lanes):
                for size in (2**n for n in range(largest.bit_length())):
                    with self._on_stream(lane):
                        self._graph(kind, fitted.method, size, kind.max_keys, 0, lane).prepare(Choice.GREEDY)

    def takes(self, session: Session) -> bool:
        """Whether the session's steps can run here; a reason why not is logged once per method."""
        return isinstance(self._kind(session), _Batchable)

    def taken(self, sessions: Sequence[Session]) -> list[bool]:
        """Which of the sessions that step together are to step here.

        Those that attend to all of a context in host memory, several to the same, share one read of it on the general
        path; here each would read all of it.
        """
        if self._taken[0] == [*sessions]:
            return self._taken[1]
        readers = Counter(id(session.context) for session in sessions if _reads_host_wholly(session))
        taken = [
            self.takes(session) and not (_reads_host_wholly(session) and readers[id(session.context)] > 1)
            for session in sessions
        ]
        self._taken = ([*sessions], taken)
        return taken

    def step(
        self, sessions: Sequence[Session], tokens: Sequence[int], samplers: Sequence[Sampler]
    ) -> list[int | Exception]:
        """One step of every session, all of which are such as `takes` says yes to.

        Returns the chosen tokens. Sessions of a batch that fails, one that finds no room in it, and one whose logits
        are not finite get an error instead and do not advance.
        """
        results: list[int | Exception] = [SparseKVError("the step did not run")] * len(sessions)
        if self._divided[0] != [*sessions]:
            self._divided = ([*sessions], self._divide(sessions))
        for parts in self._divided[1]:
            steps = [_Launched(part, [samplers[i] for i in part.numbers]) for part in parts]
            for step in steps:
                with self._guarded(step, results):
                    self._take_seats(step, results)
            begun = self._mark() if len(steps) > 1 else None
            for step in steps:
                with self._guarded(step, results), self._on_stream(step.of.lane, begun):
                    self._launch(step, tokens)
            for step in steps:
                with self._guarded(step, results), self._on_stream(step.of.lane, begun):
                    self._collect(step, results)
        return results

    def _divide(self, sessions: Sequence[Session]) -> list[list[_Part]]:
        """Batches of up to MAX_ROWS sessions of a kind, each by lane: parts as equal as can be.

        There is one lane for all where nothing comes from the host.
        """
        kinds = [self._required(session) for session in sessions]
        groups: dict[int, list[int]] = {}
        for number, kind in enumerate(kinds):
            groups.setdefault(kind.key, []).append(number)
        batches = []
        for numbers in groups.values():
            kind = kinds[numbers[0]]
            lanes = self._lanes(kind)
            for first in range(0, len(numbers), MAX_ROWS):
                batch = numbers[first : first + MAX_ROWS]
                share = -(-len(batch) // lanes)
                own = [batch[begin : begin + share] for begin in range(0, len(batch), share)]
                batches.append(
                    [
                        _Part(
                            kind,
                            some,
                            [sessions[i] for i in some],
                            max(kinds[i].max_keys for i in some),
                            first // MAX_ROWS,
                            lane,
                        )
                        for lane, some in enumerate(own)
                    ]
                )
        return batches

    def _lanes(self, kind: _Batchable) -> int:
        """That a batch of such sessions is split into."""
        return self._searching.lanes if any(issubclass(each, HybridSteps) for each in kind.layers) else 1

    def _mark(self) -> torch.cuda.Event | None:
        """What the current stream has been given until now."""
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    def _on_stream(self, lane: int, begun: torch.cuda.Event | None = None) -> AbstractContextManager[None]:
        """The stream on which a lane's steps run; see `Captures.beside`."""
        captures = self._captures[lane]
        return nullcontext() if captures is None or lane == 0 else captures.beside(begun)

    @contextmanager
    def _guarded(self, step: _Launched, results: list[int | Exception]) -> Iterator[None]:
        """What is raised becomes the result of the lane's sessions alone: others may have advanced."""
        try:
            yield
        except Exception as error:
            logger.exception("a batch of %d sessions failed", len(step.of.sessions))
            for number in step.of.numbers:
                results[number] = error

    def feed(self, session: Session, token: int) -> Tensor:
        """One step of one session such as `takes` says yes to, whatever comes next: float32 logits [1, V]."""
        greedy = [Sampler(SamplingParameters())]
        (result,) = self.step([session], [token], greedy)
        if isinstance(result, Exception):
            raise result
        return self.graph([session]).logits_BV[:1].float().clone()

    def graph(self, sessions: Sequence[Session], part: int = 0, lane: int = 0) -> StepGraph:
        """What steps of these sessions, which agree in kind, run in.

        part: of the sessions of a kind, where they are too many for one batch. Every part has its own, so that its
        sessions keep their rows. lane: that runs the step.
        """
        kind = self._required(sessions[0])
        max_keys = max(self._required(session).max_keys for session in sessions)
        return self._graph(kind, sessions[0].method, _size(len(sessions)), max_keys, part, lane)

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
                kind = self._sort(session.fitted, context.placement)
            else:
                self._log_refusal(session.method.name, reason)
                kind = reason
            self._sorted[session] = kind
        return kind

    def _sort(self, fitted: FittedMethod, placement: Placement) -> _Batchable | str:
        """The kind of batch that sessions go into, or why they cannot run in any."""
        method, manifest = fitted.method, fitted.manifest
        reason: str | None = None
        searching: type[StepAttention] | str = DenseSteps
        if stored_dtype(manifest.dtype).torch_dtype != self._dtype:
            reason = f"keys and values are {manifest.dtype}, the model computes in {self._dtype}"
        elif method.schedule.by_step or method.schedule.ahead:
            reason = "its schedule uses selections of other steps"
        else:
            reason = DenseSteps.refusal(method, manifest)
        if reason is None and method.sparse:
            searching = step_attention_for(method, manifest, placement)
            reason = searching if isinstance(searching, str) else None
        if reason is not None or isinstance(searching, str):
            self._log_refusal(method.name, str(reason))
            return str(reason)
        layers = tuple(
            searching if layer in fitted.searching else DenseSteps for layer in range(manifest.model.layers)
        )
        max_keys = max(_LEAST_KEYS, 1 << (manifest.token_count - 1).bit_length())
        parts = (method.remainder.name, tuple(sorted(method.search.items())))
        key = (placement, layers, _spec_key(method.index), _spec_key(method.partition), parts)
        number = self._keys.setdefault(key, len(self._keys))
        row_bytes = 2 * manifest.model.head_dim * self._dtype.itemsize if placement.kv_on_host else 0
        return _Batchable(number, layers, len(fitted.searching), row_bytes, max_keys)

    def _log_refusal(self, method: str, reason: str) -> None:
        if (method, reason) not in self._refused:
            self._refused.add((method, reason))
            logger.info("method %s decodes step by step without a graph: %s", method, reason)

    def _take_seats(self, step: _Launched, results: list[int | Exception]) -> None:
        """Finds the graph and seats the sessions.

        Tails grow here, on the current stream, before any lane runs: no lane then writes where another one still reads.
        """
        of = step.of
        method, size = of.sessions[0].method, _size(len(of.sessions))
        with self._on_stream(of.lane):
            graph = self._graph(of.kind, method, size, of.max_keys, of.part, of.lane)
        seats = graph.batch.seat(of.sessions)
        for place, (number, seat) in enumerate(zip(of.numbers, seats, strict=True)):
            if isinstance(seat, Exception):
                results[number] = seat
            else:
                step.rows[place] = seat
        step.graph = graph if step.rows else None

    def _launch(self, step: _Launched, tokens: Sequence[int]) -> None:
        """Starts a replay."""
        graph, step.graph = step.graph, None
        if graph is not None:
            samplers = [step.samplers[place] for place in step.rows]
            own = [tokens[step.of.numbers[place]] for place in step.rows]
            graph.launch(list(step.rows.values()), own, samplers)
            step.graph = graph  # not where that raised

    def _collect(self, step: _Launched, results: list[int | Exception]) -> None:
        """Waits for the replay, and advances the sessions."""
        if step.graph is None:
            return
        found = step.graph.collect(list(step.rows.values()))
        for place, stepped in zip(step.rows, found, strict=True):
            session = step.of.sessions[place]
            result = results[step.of.numbers[place]] = advance(step.samplers[place], stepped.token)
            if not isinstance(result, Exception):
                _count(session, step.of.kind, stepped)
                session.advance()

    def _graph(
        self, kind: _Batchable, method: Method, size: int, max_keys: int, part: int, lane: int = 0
    ) -> StepGraph:
        key = (kind.key, size, max_keys, part, lane)
        graph = self._graphs.pop(key, None)
        if graph is None:
            while len(self._graphs) >= _GRAPHS:
                self._graphs.popitem(last=False)
            searching = self._searching if HostSteps in kind.layers else None
            turn_1 = self._turn_1 if self._lanes(kind) > 1 else None
            plan = StepPlan(
                self._identity,
                method,
                size,
                max_keys,
                self._dtype,
                self._device,
                searching,
                Lane(lane, turn_1),
            )
            begin = time.perf_counter()
            graph = StepGraph(self._model, StepBatch(plan, kind.layers), self._captures[lane])
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


def _reads_host_wholly(session: Session) -> bool:
    return session.context.placement.kv_on_host and not session.method.sparse


def _spec_key(spec: IndexSpec | None) -> Hashable:
    return None if spec is None else (spec.name, spec.kind, tuple(sorted(spec.parameters.items())))


def _count(session: Session, kind: _Batchable, stepped: Stepped) -> None:
    """Notes what the step touched in all layers."""
    manifest, available, figures = session.context.manifest, session.position + 1, session.figures
    heads, searching = manifest.model.kv_heads, kind.searching
    dense = len(kind.layers) - searching
    figures.count_dense(heads * available * dense)
    if kind.row_bytes:
        rows = stepped.host_rows + dense * heads * manifest.token_count
        figures.host_bytes_read += rows * kind.row_bytes
        figures.rows_reused += stepped.rows_reused
        figures.device_wait_for_host_ns += stepped.waited_ns
    if searching:
        exact = available - stepped.searched
        figures.count_exact(heads * searching * exact, heads * searching * available)
        figures.count_kept(stepped.kept)
        figures.searches += searching if stepped.searched else 0
