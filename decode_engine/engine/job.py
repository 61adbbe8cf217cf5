"""A submitted request and how far it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic

from torch import Tensor

from decode_engine.engine.places import Place
from decode_engine.engine.prompt_pieces import Piece
from decode_engine.engine.requests import (
    Finished,
    FinishReason,
    Request,
    SessionT,
    Stream,
    Times,
    Token,
    TokenSink,
)
from decode_engine.engine.sampler import Sampler
from decode_engine.engine.sampling.logprobs import TokenLogprob, token_logprobs
from decode_engine.errors import CancelledError, DeadlineExceededError, EngineCrashedError
from index_store.memory.patience import Patience

logger = logging.getLogger(__name__)

_LOGPROB_COST = 64
"""Most that a piece of a prompt costs whose log probabilities are wanted: logits of all of its tokens are held."""


@dataclass(eq=False, slots=True)
class Job(Generic[SessionT]):
    """A submitted request until its prompt was read, and then one of its answers. Times are on the engine's clock.

    pieces: of stored tokens, then of the prompt; read: how many of them were. patience: while others are admitted and
    its memory is not free. loaded_ns: when it was first seen that its context is not being loaded; None before. answer:
    which one. tokens: of the answer, without those that end it. ending: why it ends, while a last step brings the last
    token's keys and values. sessions: that it stands for, of all answers until the prompt was read. live: the request's
    jobs that have not ended, itself included, in one list for all.
    """

    request: Request[SessionT]
    place: Place
    stream: Stream
    sampler: Sampler
    sink: TokenSink
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
    sessions: int = 1
    live: list[Job[SessionT]] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.live.append(self)

    @property
    def memory(self) -> int:
        """Bytes that its sessions may come to hold."""
        return self.sessions * self.request.memory

    def fork(self) -> list[Job[SessionT]]:
        """The jobs of all answers, this one first, once the prompt was read; each with a session of its own."""
        jobs, self.sessions = [self], 1
        for answer in range(1, self.request.answers):
            jobs.append(
                replace(
                    self,
                    answer=answer,
                    sampler=_make_sampler(self.request, answer),
                    sink=self.request.sink.fork(),
                    session=self.running().fork(),
                )
            )
        return jobs

    @property
    def reads_alone(self) -> bool:
        """Whether no other prompt is read in one pass with this one.

        It has to get the same bits as alone, or its logits are all held, or it waits for its context while it is read.
        """
        return self.sampler.repeatable or self.request.prompt_logprobs or self.request.loading()

    def piece_ids(self, piece: Piece) -> Sequence[int]:
        """The tokens of the next piece, one of the prompt."""
        return self.request.prompt[self.fed : self.fed + piece.tokens]

    def note_read(self, piece: Piece, logits: Tensor) -> None:
        """The next piece was read. logits: [1, V] after it, [T, V] where the prompt's are told."""
        if self.request.prompt_logprobs:
            first, top = self.fed, self.request.sampling.top_logprobs or 0
            following = self.request.prompt[first + 1 : first + piece.tokens + 1]
            self.prompt_logprobs += token_logprobs(logits, following, top)
        self.read += 1

    def take(self, token_id: int, now_ns: int) -> Finished | None:
        """Emits a token of the answer; the answer's last event, which the caller emits, where that was its last."""
        if self.ending is not None:  # the step was for the last token's keys and values
            return self._finished(self.ending, now_ns)
        request = self.request
        ends = token_id in request.end_ids or token_id in request.stop_ids
        piece = None if ends else self.sink.push(token_id)
        self.last_token = token_id
        self.generated += 1
        self.first_token_ns = self.first_token_ns or now_ns
        text = "" if piece is None else piece.text
        self.stream.put(Token(token_id, text, self.answer, self.sampler.logprob))
        keeping = request.keeping
        known = piece is not None or (
            keeping is not None and keeping.with_end and token_id in request.end_ids
        )
        if known:
            self.tokens.append(token_id)
        reason = None
        if token_id in request.end_ids or (self.sampler.ended and piece is not None and not piece.stopped):
            reason = FinishReason.END_OF_SEQUENCE
        elif piece is None or piece.stopped:
            reason = FinishReason.STOP
        elif self.generated >= request.max_tokens:
            reason = FinishReason.LENGTH
        if keeping is not None and known:
            self.ending = reason
            return None
        return None if reason is None else self._finished(reason, now_ns)

    def end_with_prompt(self) -> Finished:
        """The last event of an answer that has no tokens."""
        self.first_token_ns = self.prompt_done_ns
        return self._finished(FinishReason.LENGTH, self.prompt_done_ns)

    def _finished(self, reason: FinishReason, now_ns: int) -> Finished:
        return Finished(
            reason,
            self.sink.flush(),
            self.generated,
            self.sampler.seed,
            self.times(now_ns),
            self.running().figures,
            self.answer,
        )

    @property
    def unread(self) -> int:
        """Pieces of the prompt that are still to be read."""
        return len(self.pieces) - self.read

    @property
    def fed(self) -> int:
        """Tokens of the prompt that were read."""
        return sum(piece.tokens for piece in self.pieces[: self.read] if not piece.stored)

    def restore(self, tokens: int) -> None:
        """Adds a piece of stored tokens to the session."""
        if self.request.stored is not None:
            done = sum(piece.tokens for piece in self.pieces[: self.read])
            self.request.stored.restore(self.running(), done, done + tokens)
        self.read += 1

    @property
    def prompt_only(self) -> bool:
        """Whether nothing is generated."""
        return self.request.keeping is not None and self.request.keeping.prompt_only

    @property
    def goes_on(self) -> bool:
        """Whether a token may follow the next one: that is not known to be the last."""
        return self.ending is None and self.generated + 1 < self.request.max_tokens

    def end(self, now_ns: int) -> Exception | None:
        """Why nobody waits for the job any more; None as long as somebody does."""
        if self.stream.cancelled:
            return CancelledError("the client ended the call")
        deadline_ns = self.request.deadline_ns
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
        admitted_ns = self.admitted_ns
        loaded_ns = admitted_ns if self.loaded_ns is None else min(self.loaded_ns, admitted_ns)
        return Times(
            load_ns=loaded_ns - self.submitted_ns,
            queue_ns=admitted_ns - loaded_ns,
            prompt_ns=self.prompt_done_ns - admitted_ns,
            first_token_ns=self.first_token_ns - self.submitted_ns,
            total_ns=now_ns - self.submitted_ns,
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
    request: Request[SessionT], place: Place, stream: Stream, now_ns: int, prompt_chunk: int
) -> Job[SessionT]:
    """A request that is submitted now, to an engine that feeds so many tokens of prompts a turn."""
    piece_cost = min(prompt_chunk / 2, _LOGPROB_COST) if request.prompt_logprobs else prompt_chunk / 2
    return Job(
        request,
        place,
        stream,
        _make_sampler(request, 0),
        request.sink,
        now_ns,
        request.pieces(piece_cost),
        loaded_ns=None if request.loading() else now_ns,
        sessions=request.answers,
    )


def _make_sampler(request: Request[SessionT], answer: int) -> Sampler:
    ends = request.end_ids | request.stop_ids
    said = [*request.before, *request.prompt] if request.before else request.prompt
    return Sampler(request.sampling.for_answer(answer), said, ends)
