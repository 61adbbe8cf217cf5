"""A model runner without a model: after token t comes t + 1. It records what it was asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from decode_engine.engine.engine import Engine
from decode_engine.engine.prompt_pieces import PromptCost
from decode_engine.engine.requests import Finished, Request, Step, Stream, Token, TokenText
from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.stepping import Chosen, decode_by_forward
from decode_engine.layers.figures import Figures

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

    def close(self) -> None:
        self.closed += 1


FakeEngine = Engine[FakeSession]


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
        sessions: Sequence[FakeSession],
        token_ids: Sequence[Sequence[int]],
        *,
        all_logits: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        self.prompts.append({s.name: len(ids) for s, ids in zip(sessions, token_ids, strict=True)})
        for _ in range(self.layers):
            self.read_layers += 1
            between()
        return self.forward(sessions, token_ids, all_logits=all_logits)

    def forward(
        self,
        sessions: Sequence[FakeSession],
        token_ids: Sequence[Sequence[int]],
        *,
        all_logits: bool = False,
    ) -> list[Tensor]:
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
        self, sessions: Sequence[FakeSession], last_tokens: Sequence[int], samplers: Sequence[Sampler]
    ) -> Step:
        return Chosen(decode_by_forward(self.forward, sessions, last_tokens, samplers))


@dataclass
class LetterSink:
    """Token n reads as the letter n; the generation stops at `stop_at`; `flush` gives a full stop."""

    stop_at: int | None = None

    def push(self, token_id: int) -> TokenText:
        stopped = token_id == self.stop_at
        return TokenText("" if stopped else chr(ord("A") + token_id), stopped)

    def flush(self) -> str:
        return "."

    def fork(self) -> LetterSink:
        return replace(self)


@dataclass
class Client:
    """A request under test: its session, its stream, and how often the session was closed at each `on_close`."""

    session: FakeSession
    request: Request[FakeSession]
    closes: list[int]
    stream: Stream | None = None


def make_client(
    name: str,
    prompt: Sequence[int] = (0,),
    max_tokens: int = 4,
    *,
    session: FakeSession | None = None,
    start: Callable[[], FakeSession] | None = None,
    sink: LetterSink | None = None,
    end_ids: frozenset[int] = frozenset(),
    deadline_ns: int | None = None,
    context: str = "",
    memory: int = 0,
    sampling: SamplingParameters = SamplingParameters(),  # noqa: B008 - frozen
    cost: PromptCost | None = None,
    answers: int = 1,
    stop_ids: frozenset[int] = frozenset(),
    prompt_logprobs: bool = False,
) -> Client:
    """A request for a fake session called `name`."""
    made = session or FakeSession(name)
    closes: list[int] = []
    request = Request(
        start=start or (lambda: made),
        prompt=list(prompt),
        max_tokens=max_tokens,
        sampling=sampling,
        sink=sink or LetterSink(),
        end_ids=end_ids,
        deadline_ns=deadline_ns,
        on_close=lambda: closes.append(made.closed),
        context=context,
        memory=memory,
        cost=cost or PromptCost(),
        answers=answers,
        stop_ids=stop_ids,
        prompt_logprobs=prompt_logprobs,
    )
    return Client(made, request, closes)


def submit(engine: FakeEngine, client: Client) -> Client:
    client.stream = engine.submit(
        engine.reserve(client.request.context, client.request.memory), client.request
    )
    return client


def run(engine: FakeEngine, steps: int) -> None:
    for _ in range(steps):
        engine.step()


def results(client: Client) -> tuple[list[int], Finished]:
    """All token ids and the last event of a request that has ended well."""
    assert client.stream is not None
    *tokens, last = client.stream
    assert isinstance(last, Finished)
    return [token.token_id for token in tokens if isinstance(token, Token)], last


def failure(client: Client) -> tuple[list[int], Exception]:
    """The token ids before a failure, and the failure."""
    assert client.stream is not None
    seen = []
    try:
        for event in client.stream:
            assert isinstance(event, Token)
            seen.append(event.token_id)
    except Exception as error:
        return seen, error
    raise AssertionError("the stream ended without an error")
