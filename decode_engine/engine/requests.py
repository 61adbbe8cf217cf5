"""What the engine is asked and what it answers: requests, streams of events, and the protocols it relies on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from queue import SimpleQueue
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from decode_engine.engine.prompt_pieces import Piece, PromptCost, cut_prompt
from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.sampling.logprobs import TokenLogprob
from decode_engine.layers.figures import Figures


class EngineSession(Protocol):
    """What the engine needs of one request's model state."""

    @property
    def figures(self) -> Figures:
        """What the session's attention cost and touched so far; stays readable after `close`."""

    def fork(self) -> Self:
        """Another session that has read the same, and goes on by itself. The caller closes it."""

    def close(self) -> None:
        """Frees the session's memory and lets go of the context."""


SessionT = TypeVar("SessionT", bound=EngineSession)
SessionT_contra = TypeVar("SessionT_contra", bound=EngineSession, contravariant=True)


class Step(Protocol):
    """A decode step of some sessions that was launched. It uses their memory until `tokens` or `leave` has returned."""

    def follow(self) -> Step | None:
        """Launches the next step of the same sessions, with the tokens that this one chooses, which were not read yet.

        None where the host has to have a part in it. To be called once, and only while no session has left.
        """

    def leave(self, number: int) -> None:
        """Takes out a session, which may then be closed: waits until the device is done with the step. Never raises."""

    def tokens(self) -> list[int | Exception]:
        """Waits for the step: the token, or what went wrong, of each session.

        The fault of one session is not that of the others. A session and its sampler advance here, where a token comes
        back; those that have left do not, and what stands for them means nothing.
        """


class Launcher(Protocol[SessionT_contra]):
    """What takes decode steps."""

    def launch(
        self, sessions: Sequence[SessionT_contra], last_tokens: Sequence[int], samplers: Sequence[Sampler]
    ) -> Step:
        """Begins a step that feeds each session its last token and chooses its next one with its sampler.

        What it raises ends the requests of all the sessions. Where a sampler is repeatable, the session gets the same
        bits as if it were alone.
        """


class Runner(Launcher[SessionT_contra], Protocol[SessionT_contra]):
    """What the engine needs of the model."""

    def read(
        self,
        sessions: Sequence[SessionT_contra],
        token_ids: Sequence[Sequence[int]],
        *,
        all_logits: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Feeds each session a piece of its prompt, any number T of tokens: logits [1, V] after the last one of each.

        all_logits: after all of them, [T, V]. between: called now and then while the model computes, after each layer:
        other sessions may take decode steps there.

        When it raises, the same call may be made again with the same result: no session has advanced. Their figures
        may count what the failed attempt did.
        """


@dataclass(frozen=True, slots=True)
class TokenText:
    """Text that a token made certain, and whether it completed a stop string (which the text leaves out)."""

    text: str
    stopped: bool


class TokenSink(Protocol):
    """Turns tokens into text and finds stop strings; called on the scheduler's thread only."""

    def push(self, token_id: int) -> TokenText:
        """Adds a token."""

    def flush(self) -> str:
        """Text held back, at the end."""

    def fork(self) -> Self:
        """Another one for the same prompt, without the tokens that were added."""


class FinishReason(Enum):
    """Why a generation ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    END_OF_SEQUENCE = "end_of_sequence"


@dataclass(frozen=True, slots=True)
class StoredTokens(Generic[SessionT]):
    """Tokens before the prompt whose keys and values are known: a child's own.

    restore: adds those from..to-1 to a session that has those before; called on the scheduler's thread. cost: of each.
    """

    count: int
    restore: Callable[[SessionT, int, int], None]
    cost: PromptCost


@dataclass(frozen=True, slots=True)
class Keeping(Generic[SessionT]):
    """What is done with the session of a request that has ended.

    take: called on the scheduler's thread before the session is closed, with the tokens of its answer that it has keys
    and values of; what it returns is called on another thread, and returns the name of what was kept. prompt_only: the
    request ends when its prompt was read. with_end: a token that ends the sequence is kept, too: it ends a turn.
    """

    take: Callable[[SessionT, Sequence[int]], Callable[[], str]]
    prompt_only: bool = False
    with_end: bool = False


@dataclass(frozen=True, slots=True)
class Request(Generic[SessionT]):
    """One generation.

    start: makes the session; called on the scheduler's thread when the request is admitted, and again when it had to
    give way while its context was being loaded (`Engine.give_way`). loading: whether that is so.
    prompt: token ids, at least one. end_ids: tokens that end the answer. deadline_ns: on the engine's clock.
    on_close: called exactly once, after the engine has dropped the session, however the request ended.
    on_event: called after every event that is added to its stream, mostly on the scheduler's thread; must not block.
    context: requests that share one wait in one queue. cost: of the prompt's tokens, by which it is cut into pieces.
    answers: how many are generated, each by a session of its own from the end of the prompt on, and by a seed of its
    own (`SamplingParameters.for_answer`). memory: bytes that each of these sessions may come to hold.
    stop_ids: tokens that end the answer, besides. before: tokens that the request says itself, and that need not be
    read: with the prompt they are what penalties count. prompt_logprobs: whether log probabilities of the prompt's
    tokens are told, with as many likeliest ones as those of the answer. stored: what the session begins with. keeping:
    what is done with it at the end, of a single answer; its stream ends after that.
    """

    start: Callable[[], SessionT]
    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParameters
    sink: TokenSink
    end_ids: frozenset[int] = frozenset()
    deadline_ns: int | None = None
    on_close: Callable[[], None] = lambda: None
    on_event: Callable[[], None] = lambda: None
    context: str = ""
    memory: int = 0
    loading: Callable[[], bool] = lambda: False
    cost: PromptCost = field(default_factory=PromptCost)
    answers: int = 1
    stop_ids: frozenset[int] = frozenset()
    before: Sequence[int] = ()
    prompt_logprobs: bool = False
    stored: StoredTokens[SessionT] | None = None
    keeping: Keeping[SessionT] | None = None

    def pieces(self, most: float) -> list[Piece]:
        """What is read of it at a time: pieces of stored tokens and of the prompt, each of a cost of at most `most`."""
        prompt = cut_prompt(self.cost, len(self.prompt), most)
        if self.stored is None:
            return prompt
        copied = cut_prompt(self.stored.cost, self.stored.count, most)
        return [*(piece._replace(stored=True) for piece in copied), *prompt]


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The prompt was read. logprobs: of its tokens but the first one, before which only the stored context stands."""

    logprobs: Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token, and the text that became certain with it. answer: which of the request's.

    logprob: where it is wanted.
    """

    token_id: int
    text: str
    answer: int = 0
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """Wall-clock times of a request in nanoseconds, from its submission; `decode_ns` sums its decode steps.

    load_ns: until its context was in memory, or the request began to run behind the loading. queue_ns: from then on
    until its admission.
    """

    load_ns: int
    queue_ns: int
    prompt_ns: int
    first_token_ns: int
    total_ns: int
    decode_steps: int
    decode_ns: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer, and of a stream that of its last answer. kept: what its session was kept as."""

    reason: FinishReason
    text: str
    completion_tokens: int
    seed: int
    times: Times
    figures: Figures
    answer: int = 0
    kept: str = ""


Event = PromptRead | Token | Finished


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine does now, and did since it started, under the names of the API's ServerStatus.

    waiting, prompting, decoding: requests that wait for admission, read their prompts, and decode.
    requests: of these, and of those about to be submitted.
    session_bytes: memory that the admitted ones may come to hold. session_limit_bytes: bound of that; None without one.
    steps: turns of the scheduler. prompt_tokens: fed in them.
    decode_steps: turns in which somebody decoded. decode_tokens: tokens fed by these, so that their quotient is the
    mean batch. decode_batch: sessions that decoded in the latest turn.
    host_bytes_read, rows_reused, device_wait_for_host_ns: see `Figures`; of sessions that have ended.
    """

    waiting: int = 0
    prompting: int = 0
    decoding: int = 0
    requests: int = 0
    session_bytes: int = 0
    session_limit_bytes: int | None = None
    steps: int = 0
    prompt_tokens: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_batch: int = 0
    host_bytes_read: int = 0
    rows_reused: int = 0
    device_wait_for_host_ns: int = 0

    def after_turn(self) -> EngineStats:
        """With one more turn of the scheduler counted, which begins."""
        return replace(self, steps=self.steps + 1)

    def after_prompts(self, tokens: int) -> EngineStats:
        """With prompt tokens counted that were fed."""
        return replace(self, prompt_tokens=self.prompt_tokens + tokens)

    def after_decoding(self, batch: int) -> EngineStats:
        """With a turn counted in which so many decoded."""
        return replace(
            self,
            decode_steps=self.decode_steps + (batch > 0),
            decode_tokens=self.decode_tokens + batch,
            decode_batch=batch,
        )

    def after_session(self, figures: Figures) -> EngineStats:
        """With what a session moved counted, at its end."""
        return replace(
            self,
            host_bytes_read=self.host_bytes_read + figures.host_bytes_read,
            rows_reused=self.rows_reused + figures.rows_reused,
            device_wait_for_host_ns=self.device_wait_for_host_ns + figures.device_wait_for_host_ns,
        )


class GiveWayError(Exception):
    """A session stopped waiting for a layer of its context because others can be served; see `Engine.give_way`."""


class Stream:
    """Events of one request: `PromptRead` where it is wanted, tokens, then `Finished`, once for each of its answers.

    Iterating raises what ended the request otherwise, all answers of it.

    Read by one reader, either by iterating, which waits, or by `take`, which does not.
    """

    def __init__(
        self, wake: Callable[[], None], on_event: Callable[[], None] = lambda: None, answers: int = 1
    ) -> None:
        self._events: SimpleQueue[Event | Exception] = SimpleQueue()
        self._answers = answers
        self._wake = wake
        self._on_event = on_event
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[Event]:
        left = self._answers
        while left:
            event = self._events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            left -= isinstance(event, Finished)

    def take(self) -> list[Event | Exception]:
        """All events that are there now, in order; an exception is the last one, like the last `Finished`."""
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def cancel(self) -> None:
        """Ends the request within a step or two; its stream then raises CancelledError. Harmless when it has ended."""
        self._cancelled.set()
        self._wake()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def put(self, event: Event | Exception) -> None:
        """Adds an event; for the engine."""
        self._events.put(event)
        self._on_event()
