"""Steps that are launched behind others in flight: every client gets the tokens that it gets alone and step by step.

The device of these tests does its work late, at random. Its model tells the next token by all that a step reads of a
session: the tokens in its tail, where the records say that it lies, its position, and the counts of its search. It
notes as a fault what a step reads or writes of a session that is closed, or of a tail that has moved.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode_engine.engine.engine import Engine
from decode_engine.engine.requests import Finished, Keeping, Request, Stream, Token
from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.sampling.logit_rules import LogitRules
from decode_engine.engine.stepping import Flight
from decode_engine.errors import CancelledError, DeadlineExceededError
from decode_engine.host_search.workers import SearchThreads
from decode_engine.kernels import records
from decode_engine.kernels.attention.row_groups import HEADER
from decode_engine.kernels.device_queue import DeviceQueue
from decode_engine.layers.session import Session
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps import operator
from decode_engine.steps.attention.dense_steps import DenseSteps
from decode_engine.steps.batches import Part
from decode_engine.steps.part_step import PartStep
from decode_engine.steps.step_graph import StepGraph
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod
from index_store.methods.presets import METHODS, get_method
from tests.decode_engine.engine.fake_runner import LetterSink
from tests.support.tiny_model import IDENTITY as TINY

CPU = torch.device("cpu")
VOCABULARY = 120
BROKEN = 119
"""After this token there are no finite logits."""
IDENTITY = replace(TINY, layers=2, query_heads=2, kv_heads=1, head_dim=64, vocab_size=VOCABULARY)
ROW_BYTES = 2 * IDENTITY.head_dim * 4


class LateDevice(DeviceQueue):
    """Does what it is given in order, but some of it only when that is waited for."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._pending: deque[Callable[[], object]] = deque()
        self._given = self._done = 0
        self.faults: list[str] = []

    def do(self, work: Callable[[], object]) -> None:
        self._pending.append(work)
        self._given += 1
        while self._pending and self._generator.random() < 0.4:
            self._next()

    def mark(self, device: torch.device) -> Callable[[], None]:
        number = self._given

        def wait() -> None:
            while self._done < number:
                self._next()

        return wait

    def _next(self) -> None:
        self._pending.popleft()()
        self._done += 1


class WatchedSession(Session):
    """Keeps its tails' memory when it is closed, so that a late step finds nobody else's there."""

    open: list[WatchedSession]
    kept: list[Tensor]

    def close(self) -> None:
        self.open.remove(self)
        self.kept += [layer.tail.buffer for layer in self.layers]
        super().close()


def told_logits(keys: int, tokens: Sequence[int], told: Sequence[int]) -> Tensor:
    """Logits [V] after these tokens: as good as random."""
    number = 7
    for each in (keys, *tokens, *told):
        number = (number * 1000003 + each + 1) % (2**61 - 1)
    generator = torch.Generator().manual_seed(number)
    return torch.randn(VOCABULARY, generator=generator) * (torch.nan if tokens[-1] == BROKEN else 3.0)


@dataclass
class World:
    """A device, its model, and what the engine needs of both."""

    device: LateDevice | None
    open: list[WatchedSession] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stepper = Stepper(self.model, IDENTITY, torch.float32, CPU, queue=self.device)
        self.launch = self.stepper.launch

    def start(self, context: ResidentContext, fitted: FittedMethod) -> WatchedSession:
        session = WatchedSession(context, fitted)
        session.open, session.kept = self.open, self.kept
        self.open.append(session)
        return session

    def fork(self, session: WatchedSession) -> WatchedSession:
        """As `Session.fork`, watched, too."""
        other = self.start(session.context, session.fitted)
        for layer, from_layer in zip(other.layers, session.layers, strict=True):
            layer.adopt(from_layer)  # type: ignore[arg-type]
        other.position = session.position
        return other

    def read(
        self, sessions: Sequence[Session], token_ids: Sequence[Sequence[int]], *, all_logits: bool = False
    ) -> list[Tensor]:
        """Reads prompts, at once."""
        found = []
        for session, ids in zip(sessions, token_ids, strict=True):
            rows = torch.zeros(1, len(ids), 2, IDENTITY.head_dim)
            rows[0, :, 0, 0] = torch.tensor(ids)
            session.restore([rows] * IDENTITY.layers)
            tail = session.layers[0].tail.rows[0, :, 0, 0].int().tolist()
            found.append(told_logits(session.context.manifest.token_count, tail, ())[None])
        return found

    def model(self, tokens_B1: Tensor, positions_B1: Tensor, number: Tensor) -> Tensor:
        """A step of the device, whenever that comes to it."""
        batch = operator._live[int(number)]
        logits_BV = torch.zeros(len(tokens_B1), VOCABULARY)
        used = []
        for row, record in enumerate(batch._records_LBF[0].tolist()):
            count = record[records.TAIL_KEYS]
            if count:
                used.append(row)
                told = [record[each] for each in (records.FIRST, records.END, records.KEEP)]
                self._write_tails(batch._records_LBF[:, row], count, int(tokens_B1[row]))
                if int(positions_B1[row]) != record[records.KEYS] + count - 1:
                    self._fault(f"position {int(positions_B1[row])} with {count} tokens in the tail")
                logits_BV[row] = told_logits(record[records.KEYS], self._tail(record, count), told)
        for attention in batch.attentions:
            if isinstance(attention, DenseSteps):
                order = attention._groups.table[HEADER : HEADER + len(used)].tolist()
                if sorted(order) != used:
                    self._fault(f"rows {order} in the table, {used} in the step")
        return logits_BV

    def _write_tails(self, records_LF: Tensor, count: int, token: int) -> None:
        for layer, record in enumerate(records_LF.tolist()):
            owners = [
                each
                for each in self.open
                if each.layers[layer].tail.buffer.data_ptr() == record[records.TAIL]
            ]
            if len(owners) != 1 or owners[0].layers[layer].tail.capacity < count:
                self._fault(f"row {count} of a tail that nobody has")
            ctypes.c_float.from_address(record[records.TAIL] + (count - 1) * ROW_BYTES).value = token

    def _tail(self, record: Sequence[int], count: int) -> list[int]:
        first = record[records.TAIL]
        return [int(ctypes.c_float.from_address(first + row * ROW_BYTES).value) for row in range(count)]

    def _fault(self, text: str) -> None:
        if self.device is not None:
            self.device.faults.append(text)


@dataclass
class Asked:
    """What a client asks for, when it does, and when it does not care any more."""

    context: int
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParameters
    stop_at: int | None = None
    stop_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    answers: int = 1
    keep: bool = False
    begins: int = 0
    cancels: int | None = None
    deadline: int | None = None


@dataclass
class Got:
    """What it got: tokens of each answer, how they ended, and what was kept of the session."""

    tokens: list[list[int]]
    ends: dict[int, Any] = field(default_factory=dict)
    failed: Exception | None = None
    kept: list[Any] = field(default_factory=list)
    closes: int = 0


@pytest.fixture(scope="module")
def contexts() -> list[tuple[ResidentContext, FittedMethod]]:
    """Two of full attention, and one whose searched range moves with the tail."""
    searching = replace(METHODS["multipole"], recent=8, append_block=4)
    made = []
    for method, length in ((METHODS["full"], 17), (METHODS["full"], 30), (searching, 90)):
        context = made_up_context(IDENTITY, "float32", method, length)
        made.append((context, method.on(context.manifest)))
    return made


@pytest.fixture
def flying(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """With steps in flight; a number for each that follows one."""
    monkeypatch.setattr(Stepper, "flies", True)
    followed: list[int] = []
    feed = StepGraph._feed_chosen
    monkeypatch.setattr(StepGraph, "_feed_chosen", lambda graph: (followed.append(1), feed(graph)))
    return followed


def serve(
    world: World, contexts: list[tuple[ResidentContext, FittedMethod]], asked: Sequence[Asked]
) -> list[Got]:
    """All requests through one engine, whose clock counts turns, until all have ended."""
    turn = 0
    engine: Engine[Any] = Engine(world, max_sessions=6, max_waiting=50, prompt_chunk=8, clock_ns=lambda: turn)
    got = [Got([[] for _ in range(each.answers)]) for each in asked]
    streams: dict[int, Stream] = {}
    while len(streams) < len(asked) or engine.places:
        for number, each in enumerate(asked):
            if each.begins == turn:
                request = make_request(world, contexts, each, got[number])
                streams[number] = engine.submit(engine.reserve(), request)
            if each.cancels == turn and number in streams:
                streams[number].cancel()
        engine.step()
        turn += 1
        assert turn < 2000
        for number, stream in streams.items():
            take_events(stream, got[number])
    engine.shutdown()
    for number, stream in streams.items():
        take_events(stream, got[number])
    return got


def make_request(
    world: World, contexts: list[tuple[ResidentContext, FittedMethod]], asked: Asked, got: Got
) -> Request[Any]:
    context, fitted = contexts[asked.context]

    def start() -> WatchedSession:
        session = world.start(context, fitted)
        session.fork = lambda: world.fork(session)  # type: ignore[method-assign]
        return session

    def keep(session: Session, tokens: Sequence[int]) -> Callable[[], str]:
        rows = [rows_HT2D[0, :, 0, 0].int().tolist() for rows_HT2D in session.tail_rows()]
        got.kept.append((rows, list(tokens)))
        return lambda: "child"

    def closed() -> None:
        got.closes += 1

    return Request(
        start,
        asked.prompt,
        asked.max_tokens,
        asked.sampling,
        LetterSink(asked.stop_at),
        end_ids=asked.end_ids,
        stop_ids=asked.stop_ids,
        deadline_ns=asked.deadline,
        on_close=closed,
        context=str(asked.context),
        answers=asked.answers,
        keeping=Keeping(keep) if asked.keep else None,
    )


def take_events(stream: Stream, got: Got) -> None:
    for event in stream.take():
        assert got.failed is None, "nothing follows a failure"
        if isinstance(event, Exception):
            got.failed = event
        elif isinstance(event, Finished):
            figures = event.figures
            counted = (event.reason, event.completion_tokens, event.text, event.kept, event.seed)
            assert event.answer not in got.ends
            got.ends[event.answer] = (*counted, figures.attended, figures.available, figures.searches)
        elif isinstance(event, Token):
            assert event.answer not in got.ends, "nothing follows the end of an answer"
            got.tokens[event.answer].append(event.token_id)


def ask(generator: random.Random) -> Asked:
    """A request; some begin with so many tokens that their tails have to grow."""
    choose = generator.random
    sampling = SamplingParameters()
    if choose() < 0.5:
        top_k, top_p = generator.choice([(0, 1.0), (5, 1.0), (0, 0.8)])
        seed = generator.randrange(100) if choose() < 0.8 else None
        sampling = SamplingParameters(generator.choice([0.7, 2.0]), top_p, top_k, seed or 1)
    by_hand = choose() < 0.1
    if by_hand:
        bias = {generator.randrange(BROKEN): 6.0 for _ in range(8)}
        sampling = replace(sampling, rules=LogitRules(frequency_penalty=2.0, logit_bias=bias))
    length = generator.randint(118, 127) if choose() < 0.2 else generator.randint(1, 9)
    begins = generator.randrange(40)
    return Asked(
        context=generator.randrange(3),
        prompt=[generator.randrange(BROKEN) for _ in range(length)],
        max_tokens=generator.choice([1, 3, 9] if by_hand else [1, 2, 10, 30, 50]),
        sampling=sampling,
        stop_at=generator.randrange(VOCABULARY) if choose() < 0.3 else None,
        stop_ids=frozenset(generator.sample(range(VOCABULARY), 1 if choose() < 0.3 else 0)),
        end_ids=frozenset(generator.sample(range(VOCABULARY), 1)),
        answers=generator.choice([1, 1, 1, 2, 3]),
        begins=begins,
        cancels=begins + generator.randrange(40) if choose() < 0.2 else None,
        deadline=begins + generator.randrange(40) if choose() < 0.2 else None,
    )


@pytest.mark.parametrize("seed", range(10))
def test_clients_get_what_they_get_alone_and_step_by_step(
    contexts: list[tuple[ResidentContext, FittedMethod]],
    monkeypatch: pytest.MonkeyPatch,
    flying: list[int],
    seed: int,
) -> None:
    generator = random.Random(seed)
    asked = [ask(generator) for _ in range(10)]
    for each in asked[:2]:
        each.answers, each.keep = 1, True
    device = LateDevice(generator)
    world = World(device)
    got = serve(world, contexts, asked)
    assert device.faults == []
    assert world.open == []
    assert len(flying) > 5
    monkeypatch.setattr(Stepper, "flies", False)
    for each, found in zip(asked, got, strict=True):
        patient = replace(each, cancels=None, deadline=None, begins=0)
        (alone,) = serve(World(None), contexts, [patient])
        assert found.closes == alone.closes == 1
        if isinstance(found.failed, CancelledError | DeadlineExceededError):
            for tokens, whole in zip(found.tokens, alone.tokens, strict=True):
                assert tokens == whole[: len(tokens)]
        else:
            assert str(found.failed) == str(alone.failed)
            assert found.kept == alone.kept
            if found.failed is None:
                assert (found.tokens, found.ends) == (alone.tokens, alone.ends)


def test_no_step_is_launched_behind_one_that_is_known_to_be_the_last(
    contexts: list[tuple[ResidentContext, FittedMethod]], flying: list[int]
) -> None:
    asked = Asked(0, [1, 2], 6, SamplingParameters())
    (got,) = serve(World(LateDevice(random.Random(0))), contexts, [asked])
    assert len(got.tokens[0]) == 6
    assert len(flying) == 4, "the first token is the prompt's, and the first step follows none"


def test_who_joins_steps_as_soon_as_the_step_in_flight_has_ended(
    contexts: list[tuple[ResidentContext, FittedMethod]], flying: list[int]
) -> None:
    world = World(LateDevice(random.Random(0)))
    one, other = sessions = [world.start(*contexts[0]) for _ in range(2)]
    world.read(sessions, [[5], [7]])
    flight, samplers = Flight(world), [Sampler(SamplingParameters()) for _ in sessions]
    (first,) = flight.step([one], [3], samplers[:1], follow=True)
    second, none = flight.step(sessions, [first, 4], samplers, follow=True)  # type: ignore[list-item]
    assert isinstance(second, int)
    assert none is None
    assert all(isinstance(each, int) for each in flight.step(sessions, [second, 4], samplers, follow=True))
    assert (one.tail_keys, other.tail_keys) == (4, 2)
    flight.leave(one)
    (left,) = flight.step([other], [0], samplers[1:], follow=True)
    assert isinstance(left, int)
    assert (one.tail_keys, other.tail_keys) == (4, 3), "who has left has not advanced"
    flight.leave(other)
    assert world.device is not None
    assert world.device.faults == []


def test_a_step_that_fails_behind_one_in_flight_ends_its_sessions_only(
    contexts: list[tuple[ResidentContext, FittedMethod]], flying: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the other batch go on."""
    world = World(LateDevice(random.Random(0)))
    sessions = [world.start(*contexts[0]), world.start(*contexts[2])]
    world.read(sessions, [[5], [7]])
    flight, samplers = Flight(world), [Sampler(SamplingParameters()) for _ in sessions]
    launch = StepGraph.launch

    def failing(graph: StepGraph, rows: Any, tokens: Any, samplers: Any) -> Any:
        if tokens is None and graph.batch.sessions[0] is sessions[0]:
            raise RuntimeError("out of something")
        return launch(graph, rows, tokens, samplers)

    monkeypatch.setattr(StepGraph, "launch", failing)
    tokens = flight.step(sessions, [3, 4], samplers, follow=True)
    assert all(isinstance(each, int) for each in tokens)
    failed, token = flight.step(sessions, tokens, samplers, follow=False)  # type: ignore[arg-type]
    assert str(failed) == "out of something"
    assert isinstance(token, int)
    assert [session.tail_keys for session in sessions] == [2, 3]


@pytest.mark.parametrize(
    ("name", "placement", "lanes", "flies"),
    [
        ("full", Placement.DEVICE, 2, True),
        ("pq+dropped", Placement.HYBRID, 1, True),
        ("pq+dropped", Placement.HYBRID, 2, False),
        ("csattention", Placement.HOST, 1, False),
    ],
)
def test_steps_that_the_host_has_a_part_in_do_not_fly(
    flying: list[int], name: str, placement: Placement, lanes: int, flies: bool
) -> None:
    method = get_method(name)
    context = made_up_context(IDENTITY, "float32", method, 90, placement=placement)
    stepper = Stepper(World(None).model, IDENTITY, torch.float32, CPU, searching=SearchThreads(1, lanes))
    session, sampler = Session(context, method.on(context.manifest)), Sampler(SamplingParameters())
    part = Part(stepper._required(session), [0], [session], 1, 4096, 0, 0)
    assert stepper._can_fly([[PartStep(part, [sampler])]]) is flies
