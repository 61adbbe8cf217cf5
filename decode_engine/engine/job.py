"""A submitted request: its place among all that there may be, its way back to who asked for it, and how far it is."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from decode_engine.engine.drafting import Drafter
from decode_engine.engine.prompt_pieces import Piece
from decode_engine.engine.requests import SessionT, Work
from decode_engine.engine.sampler import Sampler
from decode_engine.engine.sampling.edits import token_logprobs
from decode_engine.errors import (
    CancelledError,
    DeadlineExceededError,
    EngineCrashedError,
    TooManyRequestsError,
)
from decode_engine.orders.events import Ends, Event, FinishReason, Says, Times, TokenLogprob, event_of_error
from decode_engine.orders.order import Order
from index_store.errors import SparseKVError
from index_store.memory.patience import Patience
from index_store.store.description.callers import NEWCOMERS, crowds

logger = logging.getLogger(__name__)


class Reply:
    """What a request is told, and what was asked of it since. Any thread calls `tell` and `fail`, which never wait.

    cancelled: nobody waits for it any more. stops: how many tokens answers have that a stop string ended, by answer.
    """

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self.tell = tell
        self.cancelled = False
        self.stops: dict[int, int] = {}

    def fail(self, error: Exception) -> None:
        """The request has ended by an error; nothing follows."""
        if not isinstance(error, SparseKVError):
            logger.error("a request failed", exc_info=error)
        self.tell(event_of_error(error))


class Sink(Protocol):
    """Where events of a door's requests go: to its loop, or through a socket."""

    def send(self, batch: Sequence[tuple[int, Event]]) -> None:
        """Hands events over, each with its request's number, in order. One thread calls it at a time; never waits."""


class Outbox:
    """Events of a door's requests until they are sent, all that are there at once. Thread-safe."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._events: list[tuple[int, Event]] = []
        self._lock = threading.Lock()

    def put(self, number: int, event: Event) -> None:
        with self._lock:
            self._events.append((number, event))

    def flush(self) -> None:
        if not self._events:
            return
        with self._lock:  # while it is sent, too: batches keep their order
            batch, self._events = self._events, []
            if batch:
                self._sink.send(batch)


class Use:
    """What a request uses, for whoever counts it: here nobody does."""

    def read(self, tokens: int) -> None:
        """Tokens of its prompt were read."""

    def generated(self, tokens: int) -> None:
        """Tokens of its answers came."""

    def close(self) -> None:
        """It has ended."""


class Places:
    """Counts requests from before they cost anything until they have ended. Thread-safe."""

    def __init__(self, most: int, kept: int, client: int | None = None) -> None:
        """most: places. kept: that requests on one context, or of one client, leave for others. client: that one client
        may have, if not so many. Of tenants see `crowds`."""
        self._most = most
        self._most_of_one = most - kept
        self._most_of_client = client or most - kept
        self._taken: Counter[tuple[str, str]] = Counter()  # by tenant and context
        self._clients: Counter[tuple[str, str]] = Counter()
        self._tenants: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        with self._lock:
            return self._taken.total()

    def take(self, context: str, client: str, tenant: str = "", use: Use | None = None) -> Place:
        """client, tenant: "" is nobody. Raises TooManyRequestsError when there is no place left for any of them."""
        of_context, of_client = (tenant, context), (tenant, client)
        with self._lock:
            if client and self._clients[of_client] >= self._most_of_client:
                raise TooManyRequestsError(
                    f"{self._clients[of_client]} requests of this client are running or waiting, which is the limit "
                    "for one client; try again later",
                    limit=self._most_of_client,
                )
            total, own = self._taken.total(), self._taken[of_context]
            if total >= self._most:
                raise TooManyRequestsError(
                    f"{total} requests are running or waiting, which is the limit; try again later",
                    limit=self._most,
                )
            if own >= self._most_of_one:
                raise TooManyRequestsError(
                    f"{own} requests on this context are running or waiting, which is the limit for one context; try "
                    "again later",
                    limit=self._most_of_one,
                )
            has = self._tenants[tenant]
            if crowds(tenant, has, self._most - total):
                raise TooManyRequestsError(
                    f"{has} requests of this tenant are running or waiting, and the {self._most - total} places that "
                    "are left are for others; try again later",
                    limit=NEWCOMERS * (self._most - total),
                )
            self._taken[of_context] += 1
            self._clients[of_client] += 1
            self._tenants[tenant] += 1
        return Place(partial(self._give_back, of_context, of_client, tenant), use)

    def _give_back(self, of_context: tuple[str, str], of_client: tuple[str, str], tenant: str) -> None:
        with self._lock:
            _take_one(self._taken, of_context)
            _take_one(self._clients, of_client)
            _take_one(self._tenants, tenant)


KeyT = TypeVar("KeyT")


def _take_one(taken: Counter[KeyT], key: KeyT) -> None:
    taken[key] -= 1
    if not taken[key]:
        del taken[key]


class Place:
    """The right to submit one request; given back when the request ends, or by `release` if none is submitted."""

    def __init__(self, give_back: Callable[[], None], use: Use | None = None) -> None:
        self.use = use or Use()
        self._give_back: Callable[[], None] | None = give_back
        self._lock = threading.Lock()

    def release(self) -> None:
        """Gives the place back; calls after the first do nothing."""
        with self._lock:
            give_back, self._give_back = self._give_back, None
        if give_back is not None:
            call_all(self.use.close, give_back)


_LOGPROB_COST = 64
"""Most that a piece of a prompt costs whose log probabilities are wanted: logits of all of its tokens are held."""


@dataclass(eq=False, slots=True)
class Job(Generic[SessionT]):
    """An order until its prompt was read, and then one of its answers. Times are on the engine's clock.

    pieces: of stored tokens, then of the prompt; read: how many of them were. patience: while others are admitted and
    its memory is not free. loaded_ns: when it was first seen that its context is not being loaded; None before. answer:
    which one. drafter: of its drafts, where there are any. tokens: of the answer, without those that end it. ending:
    why it ends, while a last step brings the last token's keys and values. sessions: that it stands for, of all answers
    until the prompt was read. live: the order's jobs that have not ended, itself included, in one list for all. ahead:
    what was last said of its place in the line.
    """

    work: Work[SessionT]
    place: Place
    reply: Reply
    sampler: Sampler
    submitted_ns: int
    pieces: Sequence[Piece]
    patience: Patience = field(default_factory=Patience)
    session: SessionT | None = None
    read: int = 0
    last_token: int = -1
    generated: int = 0
    tokens: list[int] = field(default_factory=list)
    ending: FinishReason | None = None
    loaded_ns: int | None = None
    admitted_ns: int = 0
    prompt_done_ns: int = 0
    first_token_ns: int = 0
    decode_steps: int = 0
    decode_ns: int = 0
    answer: int = 0
    drafter: Drafter | None = None
    sessions: int = 1
    live: list[Job[SessionT]] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    ahead: int | None = None

    def __post_init__(self) -> None:
        self.live.append(self)

    @property
    def order(self) -> Order:
        return self.work.order

    @property
    def tenant(self) -> str:
        return self.work.order.tenant

    @property
    def memory(self) -> int:
        """Bytes that its sessions may come to hold."""
        return self.sessions * self.work.memory

    def fork(self) -> list[Job[SessionT]]:
        """The jobs of all answers, this one first, once the prompt was read; each with a session of its own."""
        jobs, self.sessions = [self], 1
        for answer in range(1, self.order.answers):
            session = self.running().fork()
            jobs.append(replace(self, answer=answer, sampler=self.work.sampler(answer), session=session))
        for job in jobs:
            job.drafter = self.work.drafter()
        return jobs

    @property
    def reads_alone(self) -> bool:
        """Whether no other prompt is read in one pass with this one.

        It has to get the same bits as alone, or its logits are all held, or it waits for its context while it is read.
        """
        return self.sampler.repeatable or self.order.prompt_logprobs or self.work.loading

    def piece_ids(self, piece: Piece) -> Sequence[int]:
        return self.work.prompt[self.fed : self.fed + piece.tokens]

    def note_read(self, piece: Piece, logits: Tensor) -> None:
        """The next piece was read. logits: [1, V] after it, [T, V] where the prompt's are told."""
        if self.order.prompt_logprobs:
            first, top = self.fed, self.order.sampling.top_logprobs or 0
            following = self.work.prompt[first + 1 : first + piece.tokens + 1]
            self.prompt_logprobs += token_logprobs(logits, following, top)
        self.read += 1

    def take(self, token_ids: Sequence[int], now_ns: int) -> FinishReason | None:
        """Says tokens of the answer up to its last; why the answer ends, where it does."""
        self.first_token_ns = self.first_token_ns or now_ns
        said: list[int] = []
        reason: FinishReason | None = None
        for token_id in token_ids:
            if reason is None and self.ending is None:
                reason = self._take(token_id, self.sampler.ended and len(said) + 1 == len(token_ids))
                said.append(token_id)
            elif reason is None:  # the row was for the last token's keys and values
                reason = self.ending
        if said:
            self.running().figures.accepted += len(said) - 1
            told = self.sampler.logprobs
            logprobs = tuple(told.popleft() for _ in said) if told else ()
            last = (reason or self.ending) is not None and self.awaits_stop
            self.reply.tell(Says(self.answer, tuple(said), logprobs, last))
        return reason

    def _take(self, token_id: int, whole: bool) -> FinishReason | None:
        """Adds a token to the answer; why it ends, where nothing has to come behind it.

        whole: the answer is, by its grammar.
        """
        ends_sequence = token_id in self.work.end_ids and not self.order.ignore_eos
        ends = ends_sequence or token_id in self.order.stop_token_ids
        self.last_token = token_id
        self.generated += 1
        if self.drafter is not None:
            self.drafter.take(token_id)
        reason: FinishReason | None = None
        if ends_sequence or (whole and not ends):
            reason = "end_of_sequence"
        elif ends:
            reason = "stop"
        elif self.generated >= self.work.max_tokens:
            reason = "length"
        keep = self.order.keep
        known = not ends or (keep is not None and keep.turns and ends_sequence)
        if known:
            self.tokens.append(token_id)
        if keep is not None and known:
            self.ending = reason
            return None
        return reason

    @property
    def room(self) -> int:
        """Tokens that may be drafted behind the last one: what follows the answer's last token is not wanted."""
        return 0 if self.ending is not None else self.work.max_tokens - self.generated - 1

    @property
    def awaits_stop(self) -> bool:
        """Whether its end is the end only once its door has said how many of its tokens are of the answer."""
        return self.order.keep is not None and bool(self.order.stops) and self.answer not in self.reply.stops

    def stopped(self, held: bool) -> FinishReason | None:
        """Why it ends by what its door said of stop strings; None where it said nothing, or a step has to come first.

        held: the answer has ended, and waited for this.
        """
        count = self.reply.stops.get(self.answer)
        if count is None or self.session is None or not self.generated:
            return None
        if self.order.keep is not None and count >= self.generated:
            self.ending = self.ending or "stop"
            return self.ending if held else None  # the last token has no keys and values yet
        return "stop"

    def ends(self, reason: FinishReason, now_ns: int) -> Ends:
        if self.order.keep is not None and self.order.keep.prompt_only:
            self.first_token_ns = self.prompt_done_ns
        return Ends(
            self.answer,
            reason,
            min(self.generated, self.reply.stops.get(self.answer, self.generated)),
            self.sampler.seed,
            self.times(now_ns),
            asdict(self.running().figures),
        )

    @property
    def kept_tokens(self) -> Sequence[int]:
        return self.tokens[: self.reply.stops.get(self.answer, len(self.tokens))]

    @property
    def unread(self) -> int:
        return len(self.pieces) - self.read

    @property
    def fed(self) -> int:
        return sum(piece.tokens for piece in self.pieces[: self.read] if not piece.stored)

    def restore(self, tokens: int) -> None:
        done = sum(piece.tokens for piece in self.pieces[: self.read])
        self.work.restore(self.running(), done, done + tokens)
        self.read += 1

    @property
    def goes_on(self) -> bool:
        """Whether a token may follow the next one before that is known: that is not known to be the last."""
        return self.room > 0 and (self.drafter is None or not self.drafter.waits)

    def end(self, now_ns: int) -> Exception | None:
        """Why nobody waits for the job any more; None as long as somebody does."""
        if self.reply.cancelled:
            return CancelledError("the client ended the call")
        deadline_ns = self.order.deadline_ns
        if deadline_ns is None or now_ns < deadline_ns:
            return None
        message = f"the deadline passed after {self.generated} generated tokens"
        return DeadlineExceededError(message, generated=self.generated)

    def running(self) -> SessionT:
        """The session. Raises EngineCrashedError when there is none, before the admission and after the end."""
        if self.session is None:
            raise EngineCrashedError("a request was worked on without a session")
        return self.session

    def times(self, now_ns: int) -> Times:
        """Of the request, when it ends now."""
        admitted_ns, came_ns = self.admitted_ns, self.work.arrived_ns
        arrived_ns = self.submitted_ns if came_ns is None else came_ns
        loaded_ns = admitted_ns if self.loaded_ns is None else min(self.loaded_ns, admitted_ns)
        return Times(
            load_ns=self.work.loaded_in_ns + loaded_ns - self.submitted_ns,
            queue_ns=admitted_ns - loaded_ns,
            prompt_ns=self.prompt_done_ns - admitted_ns,
            first_token_ns=self.first_token_ns - arrived_ns,
            total_ns=now_ns - arrived_ns,
            decode_steps=self.decode_steps,
            decode_ns=self.decode_ns,
        )


def call_all(*releases: Callable[[], None]) -> None:
    """Calls each of them, whether those before it failed or not."""
    for release in releases:
        try:
            release()
        except Exception:
            logger.exception("releasing a request failed")


def new_job(
    work: Work[SessionT], place: Place, reply: Reply, now_ns: int, prompt_chunk: int
) -> Job[SessionT]:
    """Work that is submitted now, to an engine that feeds so many tokens of prompts a turn."""
    told = work.order.prompt_logprobs
    piece_cost = min(prompt_chunk / 2, _LOGPROB_COST) if told else prompt_chunk / 2
    return Job(
        work,
        place,
        reply,
        work.sampler(0),
        now_ns,
        work.pieces(piece_cost),
        loaded_ns=None if work.loading else now_ns,
        sessions=work.order.answers,
    )
