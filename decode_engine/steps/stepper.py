"""Decode steps of any sessions on a GPU: divided into batches that one graph can run, launched, and read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, takewhile
from queue import SimpleQueue
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from decode_engine.engine.requests import Found
from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.stepping import sample, take
from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.kernels.device_queue import DeviceQueue
from decode_engine.layers.dense_layer import keys_in_chunks, keys_in_window
from decode_engine.layers.session import Session
from decode_engine.steps.attention.host_steps import HostPlan
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.attention.step_batch import StepBatch
from decode_engine.steps.batch_kinds import BatchKind, BatchKinds, unreadable
from decode_engine.steps.graph_cache import AllocationMeter, GraphCache
from decode_engine.steps.step_graph import Captures, Choice, Replay, StepGraph, StepModel, Stepped
from index_store.attention.attention_state import LogitForm
from index_store.errors import SparseKVError, format_bytes
from index_store.memory.placement import Placement
from index_store.methods.method import FittedMethod, Method
from index_store.store.description.context_id import ModelIdentity

logger = logging.getLogger(__name__)

NOT_REACHED = -1
"""What follows a draft that was wrong."""

MAX_ROWS = 64
FIXED_ROWS = 16
"""Rows of every graph that a session with a repeatable sampler steps in: products round otherwise with other numbers
of rows, but alike in all rows of one number."""


@dataclass(frozen=True, slots=True)
class Part:
    """Sessions that step in one graph of so many rows.

    numbers: of theirs among the caller's. part: see `Stepper.graph`.
    """

    kind: BatchKind
    numbers: Sequence[int]
    sessions: Sequence[Session]
    rows: int
    max_keys: int
    part: int


def divide(sessions: Sequence[Session], repeatable: Sequence[bool], kinds: Sequence[BatchKind]) -> list[Part]:
    """Batches of up to MAX_ROWS sessions of a kind.

    A graph for repeatable sessions is always of FIXED_ROWS rows and as long as these need for themselves; its other
    rows are for those that need as much.
    """
    fixed = {(kind.key, kind.max_keys) for kind in compress(kinds, repeatable)}
    groups: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        alike = (kind.key, kind.max_keys)
        groups.setdefault(alike if alike in fixed else kind.key, []).append(number)
    parts = []
    for shared, numbers in groups.items():
        most = FIXED_ROWS if shared in fixed else MAX_ROWS
        for first in range(0, len(numbers), most):
            some = numbers[first : first + most]
            parts.append(
                Part(
                    kinds[numbers[0]],
                    some,
                    [sessions[i] for i in some],
                    FIXED_ROWS if shared in fixed else batch_size(len(some)),
                    max(kinds[i].max_keys for i in some),
                    first // most,
                )
            )
    return parts


def batch_size(count: int) -> int:
    """Rows of a batch for so many sessions."""
    return 1 << (count - 1).bit_length()


def count_touched(session: Session, kind: BatchKind, stepped: Stepped, *, follows: bool = False) -> None:
    """Notes what the step touched in all layers. follows: with another token of the session, by the same rows."""
    manifest, available, figures = session.context.manifest, session.position + 1, session.figures
    model, searching = manifest.model, kind.searching
    heads, dense = model.kv_heads, len(model.full_layers) - searching
    figures.count_dense(heads * available * dense)
    if model.window is not None:
        counted = keys_in_chunks if model.window.chunked else keys_in_window
        seen = counted(session.position, 1, model.window.size)
        figures.count_dense(model.window.kv_heads * seen * len(model.window.layers))
    if kind.row_bytes and not follows:
        rows = stepped.host_rows + dense * heads * manifest.token_count
        figures.host_bytes_read += rows * kind.row_bytes
        figures.rows_reused += stepped.rows_reused
        figures.device_wait_for_host_ns += stepped.waited_ns
    if searching:
        exact = available - stepped.searched
        figures.count_exact(heads * searching * exact, heads * searching * available)
        figures.count_kept(stepped.kept)
        figures.searches += searching if stepped.searched else 0


@dataclass(slots=True)
class PartStep:
    """A step of a part.

    samplers: of its sessions. fed: where there are drafts the tokens of all who step together, of a session one behind
    the other. rows: by place among the part's, without those that found no room. replay: where it was launched and not
    collected.
    """

    of: Part
    samplers: Sequence[Sampler]
    fed: Sequence[int] = ()
    rows: dict[int, int] = field(default_factory=dict)
    graph: StepGraph | None = None
    replay: Replay | None = None

    @contextmanager
    def guarded(self, results: list[int | Exception]) -> Iterator[None]:
        """What is raised becomes the result of the part's sessions alone: others may have advanced."""
        try:
            yield
        except Exception as error:
            logger.exception("a batch of %d sessions failed", len(self.of.sessions))
            for number in self.of.numbers:
                results[number] = error

    def launch(self, tokens: Sequence[int] | None) -> None:
        """Starts a replay. tokens: of all who step together; None for those that the step before chooses.

        What is chosen from stays open where that needs the tokens before (`choose`).
        """
        if self.graph is None or not self.rows:
            return
        own = None if tokens is None else [tokens[self.of.numbers[place]] for place in self.rows]
        samplers = [self.samplers[place] for place in self.rows]
        replay = self.graph.launch(list(self.rows.values()), own, samplers)
        if not any(sampler.waits for sampler in samplers):
            self.graph.choose(replay, 1 if tokens is None else 0, self._rows_of(self._by_host))
        self.replay = replay

    def choose(self, left: Collection[int]) -> None:
        """Starts the choice where it is open. The tokens of the step before were taken, but for who has left."""
        if self.graph is None or self.replay is None or self.replay.result_BX is not None:
            return
        replay, self.replay = self.replay, None
        gone = self._rows_of(lambda place: self.of.numbers[place] in left or self._by_host(place))
        self.graph.choose(replay, left=gone)
        self.replay = replay

    def _rows_of(self, wanted: Callable[[int], bool]) -> Sequence[int]:
        return [row for place, row in self.rows.items() if wanted(place)]

    def _by_host(self, place: int) -> bool:
        """Whether the host chooses: what is done to logits depends on the drafts before."""
        return bool(self.fed) and self.samplers[place].edited

    def _follows(self, place: int) -> bool:
        """Whether it is fed behind another token of its session."""
        return bool(self.fed and place) and self.of.sessions[place] is self.of.sessions[place - 1]

    def following(self) -> PartStep | None:
        """The next step of the same sessions, to be launched behind this one; None where one of them found no room."""
        whole = self.replay is not None and len(self.rows) == len(self.of.sessions)
        if not whole or self.graph is None or not self.graph.batch.can_follow(list(self.rows.values())):
            return None
        return replace(self, replay=None)

    def wait(self) -> None:
        """Returns when the device is done with the step, or lost."""
        if self.replay is not None:
            try:
                self.replay.wait()
            except Exception as error:
                logger.info("a step that was waited for failed: %s", error)

    def collect(self, results: list[int | Exception], left: Collection[int]) -> None:
        """Waits for the replay, and advances the sessions but for those of these numbers, which have left."""
        self.choose(left)
        if self.graph is None or self.replay is None:
            return
        found = self.graph.collect(self.replay)
        for place, stepped in zip(self.rows, found, strict=True):
            session, number, sampler = self.of.sessions[place], self.of.numbers[place], self.samplers[place]
            if number in left:
                continue
            if self._follows(place) and (results[number - 1] != self.fed[number] or sampler.ended):
                results[number] = NOT_REACHED
                continue
            if self._by_host(place):
                result = sample(sampler, self.graph.logits_BV[self.rows[place]].float())
            else:
                result = stepped.failed or take(sampler, stepped.token, stepped.logprob)
            results[number] = result
            if not isinstance(result, Exception):
                count_touched(session, self.of.kind, stepped, follows=self._follows(place))
                session.advance()


class LaunchedStep:
    """A step of sessions in one or more parts (`requests.Step`)."""

    def __init__(self, parts: Sequence[PartStep], results: list[int | Exception], flies: bool) -> None:
        """results: of sessions that are not in any part. flies: whether the next step may be launched behind it."""
        self._parts = parts
        self._results = results
        self._flies = flies
        self._left: set[int] = set()

    def follow(self) -> LaunchedStep | None:
        """See `Step.follow`."""
        for part in self._parts:
            with part.guarded(self._results):
                part.choose(self._left)
        following = [part.following() for part in self._parts] if self._flies else []
        parts = [part for part in following if part is not None]
        if not parts or len(parts) < len(self._parts):
            return None
        results = list(self._results)
        for part in parts:
            with part.guarded(results):
                part.launch(None)
        return LaunchedStep(parts, results, self._flies)

    def leave(self, number: int) -> None:
        """See `Step.leave`."""
        self._left.add(number)
        for part in self._parts:
            part.wait()

    def tokens(self) -> list[int | Exception]:
        """See `Step.tokens`."""
        for part in self._parts:
            with part.guarded(self._results):
                part.collect(self._results, self._left)
        return self._results


_GRAPH_SHARE = 8  # captured steps may hold one part in this many of a device's memory


_Stepping = tuple[list[Session], list[bool]]
"""Sessions that step together, and which of them have repeatable samplers."""


class Stepper:
    """Runs decode steps through captured graphs. One thread uses it.

    Where `flies`, a step may be launched before the tokens of the one before were read (`LaunchedStep.follow`), if no
    threads search. Of a step whose choice needs those tokens, the layers are.

    A batch's size is rounded up to a power of two. It steps in the graph of that size, or in the smallest larger one
    that was prepared; where there is none, one is captured when such a batch first comes. Idle rows of a graph change
    nothing but how products round, so that sessions that draw by seeds keep to their number of rows. The graphs used
    longest ago are dropped where memory for graphs, or of the device, is short.
    """

    flies: ClassVar[bool] = True
    """Whether steps may be in flight while the one before is read."""

    def __init__(
        self,
        model: StepModel,
        identity: ModelIdentity,
        dtype: torch.dtype,
        device: torch.device,
        *,
        searching: SearchThreads | None = None,
        forms: Sequence[LogitForm] = (),
        graph_bytes: int | None = None,
        queue: DeviceQueue | None = None,
    ) -> None:
        """dtype: in which the model computes. forms: what every layer does to logits; nothing where there are none.
        graph_bytes: that idle graphs and those in use may hold; by default a share of the device's memory.

        searching: threads for contexts that are searched on the host; one by default. queue: by which the device gets
        its work.
        """
        self._model = model
        self._identity = identity
        self._dtype = dtype
        self._device = device
        self._forms = forms
        self._caps = any(form.cap is not None for form in forms)
        self._searching = searching or SearchThreads(1)
        if graph_bytes is None and device.type == "cuda":
            graph_bytes = torch.cuda.get_device_properties(device).total_memory // _GRAPH_SHARE
        self._graphs: GraphCache[StepGraph] = GraphCache(graph_bytes)
        self._captures = Captures(device, self._graphs.alone) if device.type == "cuda" else None
        # What another thread captures goes into memory, and over streams, of its own.
        self._beside = Captures(device, self._graphs.alone) if device.type == "cuda" else None
        self._made: SimpleQueue[tuple[Hashable, StepGraph]] = SimpleQueue()
        self._handed: set[Hashable] = set()
        self._prepared: set[Hashable] = set()
        self._kinds = BatchKinds(dtype, self._caps)
        # Of the sessions that came last: most steps are of the same ones as the step before.
        self._divided: tuple[_Stepping, list[Part]] = (([], []), [])
        self._sorted: WeakKeyDictionary[Session, BatchKind | str] = WeakKeyDictionary()
        self._queue = queue or DeviceQueue()

    def prepare(self, fitted: FittedMethod, sessions: int, placement: Placement = Placement.DEVICE) -> None:
        """Captures greedy steps of up to `sessions` sessions on such a context, and compiles what the model compiles.

        placement: of the context. Does nothing for a method without kernels.
        """
        kind = self._kinds.sort(fitted, placement)
        if isinstance(kind, BatchKind):
            for size in _sizes(sessions):
                self._graphs.begin_turn()
                self._graph(kind, fitted.method, size, kind.max_keys, 0)
                self._prepared.add((kind.key, size, kind.max_keys, 0))

    def prepare_beside(
        self, fitted: FittedMethod, sessions: int, placement: Placement, least: int = 1
    ) -> None:
        """As `prepare`, for another thread than the one that steps, which finds the graphs with its next step.

        The largest batches come first: smaller ones can step in their graphs. least: sessions of the smallest.

        Only compiling and capturing happen here: rows are idle, and buffers nobody else's. What is searched for by
        threads of the host shares mailboxes with steps, and is left to the first of them. Raises torch.OutOfMemoryError
        where there is no room: no graph is dropped for it.
        """
        kind = self._kinds.sort(fitted, placement)
        if not isinstance(kind, BatchKind) or not kind.flies:
            return
        for size in reversed([*_sizes(sessions)]):
            key = (kind.key, size, kind.max_keys, 0)
            if size < min(least, MAX_ROWS) or key in self._graphs or key in self._handed:
                continue
            plan = self._plan(kind, fitted.method, size, kind.max_keys)
            with nullcontext() if self._beside is None else self._beside.beside():
                make = partial(self._make_graph, plan, kind, self._beside)
                graph = self._graphs.with_room(make, drop=False)
                self._queue.mark(self._device)()
            graph.captures = self._captures
            self._handed.add(key)
            self._made.put((key, graph))

    def kind_of(self, fitted: FittedMethod, placement: Placement) -> Hashable:
        """Equal for what steps in the same graphs, as long as the context needs; None where no graph is taken."""
        kind = self._kinds.sort(fitted, placement)
        return (kind.key, kind.max_keys) if isinstance(kind, BatchKind) else None

    def takes(self, session: Session) -> bool:
        """Whether the session's steps can run here; a reason why not is logged once per method."""
        return isinstance(self._kind(session), BatchKind)

    def step(
        self,
        sessions: Sequence[Session],
        tokens: Sequence[int],
        samplers: Sequence[Sampler],
        drafts: Sequence[Sequence[int]] = (),
    ) -> list[Found]:
        """One step of every session, all of which are such as `takes` says yes to.

        drafts: tokens that may follow those, for each session; of all, no more than there is `draft_room` for. Each is
        fed in a row of its own, and what is chosen behind it counts where all drafts up to it are those that were
        chosen.

        Returns the chosen tokens, a tuple of a session with drafts. Sessions of a batch that fails, one that finds no
        room in it, and one whose logits are not finite get an error instead and do not advance; of drafts, what went
        wrong goes wrong again in the next step.
        """
        if not any(drafts):
            return [*self.launch(sessions, tokens, samplers).tokens()]
        fed = [[token, *draft] for token, draft in zip(tokens, drafts, strict=True)]
        owners = [number for number, own in enumerate(fed) for _ in own]
        rows = [sessions[number] for number in owners], [samplers[number] for number in owners]
        launched = self.launch(rows[0], [token for own in fed for token in own], rows[1], drafted=True)
        results = iter(launched.tokens())
        return [_joined([next(results) for _ in own]) for own in fed]

    @staticmethod
    def draft_room(samplers: Sequence[Sampler]) -> int:
        """Drafts that each of so many sessions may have in a step."""
        rows = FIXED_ROWS if any(sampler.repeatable for sampler in samplers) else MAX_ROWS
        return max(0, rows // len(samplers) - 1)

    def launch(
        self,
        sessions: Sequence[Session],
        tokens: Sequence[int],
        samplers: Sequence[Sampler],
        drafted: bool = False,
    ) -> LaunchedStep:
        """Begins what `step` does. No step that was launched before may be in flight.

        What cannot fly is over when this returns: launches of one batch then follow the tokens of the one before.
        drafted: sessions come once for each of their tokens, and nothing may follow.
        """
        results: list[int | Exception] = [SparseKVError("the step did not run")] * len(sessions)
        stepping: _Stepping = ([*sessions], [sampler.repeatable for sampler in samplers])
        while not self._made.empty():
            key, graph = self._made.get()
            self._graphs.add(key, graph)
            self._prepared.add(key)
            self._handed.discard(key)
        self._graphs.begin_turn()
        if self._divided[0] != stepping:
            kinds = [self._required(session) for session in sessions]
            self._divided = (stepping, divide(*stepping, kinds))
        steps = [
            PartStep(part, [samplers[i] for i in part.numbers], tokens if drafted else ())
            for part in self._divided[1]
        ]
        flies = not drafted and self.flies and all(step.of.kind.flies for step in steps)
        for step in steps:
            with step.guarded(results):
                self._take_seats(step, results)
                step.launch(tokens)
                if not flies:
                    step.collect(results, ())
        return LaunchedStep(steps if flies else [], results, flies)

    def feed(self, session: Session, token: int) -> Tensor:
        """One step of one session such as `takes` says yes to, whatever comes next: float32 logits [1, V]."""
        greedy = [Sampler(SamplingParameters())]
        (result,) = self.step([session], [token], greedy)
        if isinstance(result, Exception):
            raise result
        return self.graph([session]).logits_BV[:1].float().clone()

    def graph(self, sessions: Sequence[Session], part: int = 0, *, repeatable: bool = False) -> StepGraph:
        """What steps of these sessions, which agree in kind, run in.

        part: of the sessions of a kind, where they are too many for one batch. Every part has its own, so that its
        sessions keep their rows. repeatable: some of them draw by seeds.
        """
        kind = self._required(sessions[0])
        max_keys = max(self._required(session).max_keys for session in sessions)
        rows = FIXED_ROWS if repeatable else batch_size(len(sessions))
        if not repeatable:
            rows = self._ready_rows(kind, rows, max_keys, part)
        return self._graph(kind, sessions[0].method, rows, max_keys, part)

    def _ready_rows(self, kind: BatchKind, rows: int, max_keys: int, part: int) -> int:
        """Rows of the graph for a batch of so many: of a larger one that was prepared, if there is none of its own."""
        for size in (size for size in _sizes(MAX_ROWS) if size >= rows):
            key = (kind.key, size, max_keys, part)
            if key in self._graphs and (size == rows or key in self._prepared):
                return size
        return rows

    def _required(self, session: Session) -> BatchKind:
        """The kind of batch that the session goes into. Raises SparseKVError when it cannot run in any."""
        kind = self._kind(session)
        if not isinstance(kind, BatchKind):
            raise SparseKVError(f"method {session.method.name!r} cannot run in a graph: {kind}")
        return kind

    def _kind(self, session: Session) -> BatchKind | str:
        """What `_sort` says, which never changes. Waits until all of the session's context is in memory."""
        kind = self._sorted.get(session)
        if kind is None:
            context = session.context
            reason = unreadable(context, self._device)
            if reason is None:
                kind = self._kinds.sort(session.fitted, context.placement)
            else:
                self._kinds.log_refusal(session.method.name, reason)
                kind = reason
            self._sorted[session] = kind
        return kind

    def _take_seats(self, step: PartStep, results: list[int | Exception]) -> None:
        """Finds the graph and seats the sessions."""
        of = step.of
        rows = of.rows
        if not any(sampler.repeatable for sampler in step.samplers):
            rows = self._ready_rows(of.kind, rows, of.max_keys, of.part)
        graph = self._graph(of.kind, of.sessions[0].method, rows, of.max_keys, of.part)
        self._graphs.with_room(lambda: graph.prepare(Choice.of(step.samplers)))
        self._graphs.trim()
        seats = graph.batch.seat(of.sessions)
        while any(isinstance(seat, torch.OutOfMemoryError) for seat in seats) and self._graphs.drop_idle():
            seats = graph.batch.seat(of.sessions)
        for place, (number, seat) in enumerate(zip(of.numbers, seats, strict=True)):
            if isinstance(seat, Exception):
                results[number] = seat
            else:
                step.rows[place] = seat
        step.graph = graph

    def _graph(self, kind: BatchKind, method: Method, size: int, max_keys: int, part: int) -> StepGraph:
        key = (kind.key, size, max_keys, part)
        graph = self._graphs.find(key)
        if graph is not None:
            return graph
        plan = self._plan(kind, method, size, max_keys)
        begin = time.perf_counter()
        graph = self._graphs.with_room(lambda: self._make_graph(plan, kind, self._captures))
        logger.info(
            "steps of %d sessions of method %s on up to %d tokens are ready, in %.1f s; they hold %s",
            size,
            method.name,
            max_keys,
            time.perf_counter() - begin,
            format_bytes(graph.nbytes),
        )
        self._graphs.add(key, graph)
        return graph

    def _plan(self, kind: BatchKind, method: Method, size: int, max_keys: int) -> StepPlan:
        return HostPlan(
            self._identity,
            method,
            size,
            max_keys,
            self._dtype,
            self._device,
            self._forms,
            self._queue,
            kind.planes,
            self._searching,
        )

    def _make_graph(self, plan: StepPlan, kind: BatchKind, captures: Captures | None) -> StepGraph:
        """Captures greedy steps of such a batch."""
        with AllocationMeter(self._device) as meter:
            batch = StepBatch(plan, kind.layers)
        graph = StepGraph(self._model, batch, captures, meter.nbytes)
        for choice in (Choice(edited=True), Choice()):
            graph.prepare(choice)
        return graph


def _sizes(sessions: int) -> Iterator[int]:
    """Of batches of up to so many sessions."""
    return (2**n for n in range(batch_size(min(sessions, MAX_ROWS)).bit_length()))


def _joined(found: Sequence[int | Exception]) -> Found:
    """What was found for a session, of what was found for each token that it was fed."""
    first, *_ = found
    if isinstance(first, Exception) or len(found) == 1:
        return first
    right = takewhile(lambda each: isinstance(each, int) and each != NOT_REACHED, found)
    return tuple(token for token in right if isinstance(token, int))
