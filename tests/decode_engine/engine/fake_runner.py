"""A model runner without a model: after token t comes t + 1. It records what it was asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from decode_engine.engine.drafting import MOST, Drafter
from decode_engine.engine.engine import Engine
from decode_engine.engine.job import Reply
from decode_engine.engine.prompt_pieces import PromptCost
from decode_engine.engine.requests import Step, Work
from decode_engine.engine.sampler import Sampler
from decode_engine.engine.stepping import Chosen, decode_by_forward
from decode_engine.layers.figures import Figures
from decode_engine.orders.events import Ends, Event, Fails, Says, Waits
from decode_engine.orders.order import KeepOptions, Order, Sampling

VOCABULARY = 64


@dataclass(eq=False)
class FakeSession:
    """Remembers what it was fed; raises `fails_with` when fed its `fails_at`-th token (counted from 0)."""

    name: str
    fails_at: int | None = None
    fails_with: BaseException = field(default_factory=lambda: ValueError("this session is broken"))
    fed: list[int] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)
    closed: int = 0

    def fork(self) -> FakeSession:
        return replace(self, fed=list(self.fed), figures=replace(self.figures))

    def rewind(self, tokens: int) -> None:
        del self.fed[len(self.fed) - tokens :]

    def close(self) -> None:
        self.closed += 1


FakeEngine = Engine[FakeSession]
Sessions, Tokens, Samplers = Sequence[FakeSession], Sequence[Sequence[int]], Sequence[Sampler]


@dataclass
class FakeRunner:
    """calls: one (names of the sessions, tokens of the longest) per forward. gate: waited for before every forward.

    prompts: of the forwards that read prompts the tokens of each session. layers: after which these let others step;
    read_layers: all of them until now.
    """

    calls: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    prompts: list[dict[str, int]] = field(default_factory=list)
    gate: threading.Semaphore | None = None
    layers: int = 0
    read_layers: int = 0

    def read(
        self,
        sessions: Sessions,
        token_ids: Tokens,
        *,
        all_logits: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        self.prompts.append({s.name: len(ids) for s, ids in zip(sessions, token_ids, strict=True)})
        for _ in range(self.layers):
            self.read_layers += 1
            between()
        return self.forward(sessions, token_ids, all_logits=all_logits)

    def forward(self, sessions: Sessions, token_ids: Tokens, *, all_logits: bool = False) -> list[Tensor]:
        if not sessions or len(sessions) != len(token_ids) or not all(token_ids):
            raise AssertionError("every session of a batch is fed tokens")
        if len(set(map(id, sessions))) < len(sessions):
            raise AssertionError("a session is in a batch once")
        if self.gate is not None:
            self.gate.acquire()
        self.calls.append((tuple(session.name for session in sessions), max(map(len, token_ids))))
        for session, ids in zip(sessions, token_ids, strict=True):
            if session.closed:
                raise AssertionError(f"{session.name} is used after it was closed")
            if session.fails_at is not None and len(session.fed) + len(ids) > session.fails_at:
                raise session.fails_with
        for session, ids in zip(sessions, token_ids, strict=True):
            session.fed.extend(ids)
        return [
            torch.nn.functional.one_hot((torch.tensor(ids) + 1) % VOCABULARY, VOCABULARY).float()[
                0 if all_logits else -1 :
            ]
            for ids in token_ids
        ]

    def launch(
        self, sessions: Sessions, last_tokens: Sequence[int], samplers: Samplers, drafts: Tokens = ()
    ) -> Step:
        forward = partial(self.forward, all_logits=True)
        return Chosen(decode_by_forward(forward, sessions, last_tokens, samplers, drafts))

    def draft(
        self, sessions: Sessions, last_tokens: Sequence[int], samplers: Samplers, counts: Sequence[int]
    ) -> list[list[int]]:
        """Every fourth token is wrong."""
        after = [range(last + 1, last + 1 + count) for last, count in zip(last_tokens, counts, strict=True)]
        return [[token % VOCABULARY if token % 4 else 0 for token in tokens] for tokens in after]

    def draft_room(self, samplers: Sequence[Sampler]) -> int:
        return MOST


@dataclass(kw_only=True, eq=False)
class FakeWork(Work[FakeSession]):
    """Work on a fake session. begin: makes it. closes: how often the session had been closed at each `close`."""

    begin: Callable[[], FakeSession]
    session: FakeSession
    closes: list[int] = field(default_factory=list)
    on_close: Callable[[], None] = lambda: None
    is_loading: Callable[[], bool] = lambda: False
    restores: Callable[[FakeSession, int, int], None] = lambda session, start, end: None
    keeps: Callable[[FakeSession, Sequence[int]], Callable[[], str]] | None = None
    drafts: Callable[[], Drafter | None] = lambda: None

    @property
    def loading(self) -> bool:
        return self.is_loading()

    def start(self) -> FakeSession:
        return self.begin()

    def restore(self, session: FakeSession, start: int, end: int) -> None:
        self.restores(session, start, end)

    def drafter(self) -> Drafter | None:
        return self.drafts()

    def keep(self, session: FakeSession, answer: Sequence[int]) -> Callable[[], str]:
        return self.keeps(session, answer)

    def close(self) -> None:
        self.closes.append(self.session.closed)
        self.on_close()


class Stream(Reply):
    """The reply to a request under test, read by iterating, which waits, or by `take`, which does not."""

    def __init__(self, wake: Callable[[], None], answers: int = 1) -> None:
        self.events: SimpleQueue[Event | Exception] = SimpleQueue()
        self._wake = wake
        self._left = answers
        super().__init__(self._put)

    def _put(self, event: Event) -> None:
        if not isinstance(event, Waits):
            self.events.put(event)

    def fail(self, error: Exception) -> None:
        super().fail(error)  # what clients would be told is made, too
        self.events.put(error)

    def cancel(self) -> None:
        self.cancelled = True
        self._wake()

    def stop(self, answer: int, tokens: int) -> None:
        self.stops[answer] = tokens
        self._wake()

    def __iter__(self) -> Iterator[Event]:
        while self._left:
            event = self.events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Fails):
                continue
            yield event
            self._left -= isinstance(event, Ends)

    def take(self) -> list[Event | Exception]:
        events = []
        while not self.events.empty():
            event = self.events.get()
            if not isinstance(event, Fails):
                events.append(event)
        return events


@dataclass
class Client:
    """A request under test: its work, and its stream."""

    work: FakeWork
    stream: Stream | None = None

    @property
    def session(self) -> FakeSession:
        return self.work.session

    @property
    def closes(self) -> list[int]:
        return self.work.closes


def make_client(
    name: str,
    prompt: Sequence[int] = (0,),
    max_tokens: int = 4,
    *,
    session: FakeSession | None = None,
    start: Callable[[], FakeSession] | None = None,
    stops: tuple[str, ...] = (),
    end_ids: frozenset[int] = frozenset(),
    deadline_ns: int | None = None,
    context: str = "",
    memory: int = 0,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    cost: PromptCost | None = None,
    answers: int = 1,
    stop_ids: frozenset[int] = frozenset(),
    ignore_eos: bool = False,
    prompt_logprobs: bool = False,
    keep: KeepOptions | None = None,
    tenant: str = "",
    priority: int = 0,
) -> Client:
    """A request for a fake session called `name`."""
    made = session or FakeSession(name)
    order = Order(
        sampling=sampling,
        stops=stops,
        stop_token_ids=stop_ids,
        ignore_eos=ignore_eos,
        answers=answers,
        prompt_logprobs=prompt_logprobs,
        deadline_ns=deadline_ns,
        keep=keep,
        tenant=tenant,
        priority=priority,
    )
    work = FakeWork(
        order=order,
        prompt=list(prompt),
        max_tokens=max_tokens,
        end_ids=end_ids,
        context=context,
        memory=memory,
        cost=cost or PromptCost(),
        begin=start or (lambda: made),
        session=made,
    )
    return Client(work)


def submit(engine: FakeEngine, client: Client) -> Client:
    work = client.work
    client.stream = Stream(engine.wake, work.order.answers)
    engine.submit(engine.reserve(work.context, work.memory), work, client.stream)
    return client


def run(engine: FakeEngine, steps: int) -> None:
    for _ in range(steps):
        engine.step()


def results(client: Client) -> tuple[list[int], Ends]:
    """All token ids and the last event of a request that has ended well."""
    *said, last = client.stream
    assert isinstance(last, Ends)
    return [token for each in said if isinstance(each, Says) for token in each.token_ids], last


def failure(client: Client) -> tuple[list[int], Exception]:
    """The token ids before a failure, and the failure."""
    seen: list[int] = []
    try:
        for event in client.stream:
            assert isinstance(event, Says)
            seen += event.token_ids
    except Exception as error:
        return seen, error
    raise AssertionError("the stream ended without an error")
