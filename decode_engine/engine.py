"""The scheduler: one thread that owns the model and advances all sessions step by step.

Every iteration drops ended requests, admits one waiting request, advances one prompt by one chunk and then takes one
decode step with all decoding sessions in a batch. So a short request streams while a long prompt is still being
read, and cancellation or a passed deadline ends a request's work within one step.

The engine speaks token ids. Text reaches it only as the opaque result of a request's `TokenSink`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic

import torch
from torch import Tensor

from decode_engine.errors import (
    CancelledError,
    DeadlineExceededError,
    EngineCrashedError,
    ShuttingDownError,
    TooManyRequestsError,
)
from decode_engine.requests import (
    Finished,
    FinishReason,
    Place,
    Request,
    Runner,
    SessionT,
    Stream,
    Times,
    Token,
)
from decode_engine.sampler import Sampler
from index_store.errors import InvalidArgumentError

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Job(Generic[SessionT]):
    """A submitted request and how far it is."""

    request: Request[SessionT]
    place: Place
    stream: Stream
    sampler: Sampler
    submitted_ns: int
    session: SessionT | None = None
    fed: int = 0
    last_token: int = -1
    generated: int = 0
    admitted_ns: int = 0
    prompt_done_ns: int = 0
    first_token_ns: int = 0
    decode_steps: int = 0
    decode_ns: int = 0

    def running(self) -> SessionT:
        """The session. Raises EngineCrashedError when there is none, before the admission and after the end."""
        if self.session is None:
            raise EngineCrashedError("a request was worked on without a session")
        return self.session


@dataclass(slots=True)
class _Queues(Generic[SessionT]):
    """Every live job is in exactly one of these; all are guarded by the engine's lock."""

    waiting: deque[_Job[SessionT]] = field(default_factory=deque)
    prompting: deque[_Job[SessionT]] = field(default_factory=deque)
    decoding: deque[_Job[SessionT]] = field(default_factory=deque)

    def all(self) -> list[_Job[SessionT]]:
        return [*self.waiting, *self.prompting, *self.decoding]

    def remove(self, job: _Job[SessionT]) -> None:
        for queue in (self.waiting, self.prompting, self.decoding):
            if job in queue:
                queue.remove(job)


class Engine(Generic[SessionT]):
    """Runs requests on a model. Thread-safe; `start` and `shutdown` are called once each."""

    def __init__(
        self,
        runner: Runner[SessionT],
        *,
        max_sessions: int = 16,
        max_waiting: int = 64,
        prompt_chunk: int = 256,
        on_start: Callable[[], None] = lambda: None,
        on_crash: Callable[[BaseException], None] = lambda error: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """max_sessions: requests in progress at once. max_waiting: requests beyond those, loading or queued.

        prompt_chunk: most prompt tokens per step. on_start: called first on the scheduler's thread.
        on_crash: told when the scheduler fails.
        Raises InvalidArgumentError for a limit out of range.
        """
        for name, value, least in (
            ("max_sessions", max_sessions, 1),
            ("max_waiting", max_waiting, 0),
            ("prompt_chunk", prompt_chunk, 1),
        ):
            if value < least:
                raise InvalidArgumentError(f"{name} is {value}, expected at least {least}", field=name)
        self._runner = runner
        self._max_sessions = max_sessions
        self._max_waiting = max_waiting
        self._prompt_chunk = prompt_chunk
        self._on_start = on_start
        self._on_crash = on_crash
        self.clock_ns = clock_ns
        self._changed = threading.Condition()
        self._queues: _Queues[SessionT] = _Queues()
        self._places = 0
        self._accepting = True
        self._stopping = False
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="decode-engine", daemon=True)

    def start(self) -> None:
        """Starts the scheduler's thread."""
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted."""
        return self._accepting and self._crash is None

    @property
    def places(self) -> int:
        """Requests that are running, queued or about to be."""
        return self._places

    def reserve(self) -> Place:
        """Takes the place of one request before it costs anything.

        Raises TooManyRequestsError when sessions and queue are full, and what `submit` raises when it would.
        """
        with self._changed:
            self._check_accepting()
            limit = self._max_sessions + self._max_waiting
            if self._places >= limit:
                raise TooManyRequestsError(
                    f"{self._places} requests are running or waiting, which is the limit; try again later",
                    limit=limit,
                )
            self._places += 1
        return Place(self._give_back)

    def _give_back(self) -> None:
        with self._changed:
            self._places -= 1

    def submit(self, place: Place, request: Request[SessionT]) -> Stream:
        """Queues a request. Its place and `on_close` are the engine's from here on, also when this raises.

        Raises InvalidArgumentError for an empty prompt or a token limit below one, ShuttingDownError while the engine
        stops, EngineCrashedError when it failed.
        """
        try:
            if not request.prompt:
                raise InvalidArgumentError("the prompt has no tokens, expected at least one", field="prompt")
            if request.max_tokens < 1:
                raise InvalidArgumentError(
                    f"max_tokens is {request.max_tokens}, expected at least 1", field="max_tokens"
                )
            sampler = Sampler(request.sampling)
            job = _Job(request, place, Stream(self._wake), sampler, submitted_ns=self.clock_ns())
            with self._changed:
                self._check_accepting()
                self._queues.waiting.append(job)
                self._changed.notify_all()
        except Exception:
            _call_all(request.on_close, place.release)
            raise
        return job.stream

    def shutdown(self, grace_s: float = 0.0) -> None:
        """Accepts nothing more, lets requests finish for `grace_s` seconds, ends the others and the thread."""
        with self._changed:
            self._accepting = False
            self._changed.wait_for(lambda: not self._queues.all() or self._crash is not None, timeout=grace_s)
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _check_accepting(self) -> None:
        if self._crash is not None:
            raise EngineCrashedError("the scheduler failed and the server has to be restarted")
        if not self._accepting:
            raise ShuttingDownError("the server is shutting down and accepts no more requests")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._on_start()
            with torch.inference_mode():
                while self._wait_for_work():
                    self.step()
        except BaseException as error:
            logger.exception("the scheduler failed")
            with self._changed:
                self._crash = error
                self._changed.notify_all()
            self._on_crash(error)
        finally:
            with self._changed:
                self._accepting = False
                left = self._queues.all()
            for job in left:
                self._fail(job, self._last_words())

    def _last_words(self) -> Exception:
        if self._crash is not None:
            return EngineCrashedError("the scheduler failed while it worked on this request")
        return ShuttingDownError("the server shut down before this request finished")

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or bool(self._queues.all()))
            return not self._stopping

    def step(self) -> None:
        """One iteration; runs on the scheduler's thread."""
        self._drop_ended()
        self._admit()
        self._advance_prompt()
        self._decode()

    def _drop_ended(self) -> None:
        now = self.clock_ns()
        with self._changed:
            jobs = self._queues.all()
        for job in jobs:
            if job.stream.cancelled:
                self._fail(job, CancelledError("the client ended the call"))
            elif job.request.deadline_ns is not None and now >= job.request.deadline_ns:
                self._fail(
                    job,
                    DeadlineExceededError(
                        f"the deadline passed after {job.generated} generated tokens", generated=job.generated
                    ),
                )

    def _admit(self) -> None:
        with self._changed:
            queues = self._queues
            live = len(queues.prompting) + len(queues.decoding)
            if live >= self._max_sessions or not queues.waiting:
                return
            job = queues.waiting.popleft()
            queues.prompting.append(job)
        job.admitted_ns = self.clock_ns()
        try:
            job.session = job.request.start()
        except Exception as error:
            self._fail(job, error)

    def _advance_prompt(self) -> None:
        with self._changed:
            if not self._queues.prompting:
                return
            job = self._queues.prompting[0]
            self._queues.prompting.rotate(-1)
        chunk = job.request.prompt[job.fed : job.fed + self._prompt_chunk]
        logits = self._forward([job], [chunk])[0]
        if isinstance(logits, Exception):
            self._fail(job, logits)
            return
        job.fed += len(chunk)
        if job.fed < len(job.request.prompt):
            return
        job.prompt_done_ns = self.clock_ns()
        with self._changed:
            self._queues.prompting.remove(job)
            self._queues.decoding.append(job)
        self._take_token(job, logits)

    def _decode(self) -> None:
        with self._changed:
            jobs = list(self._queues.decoding)
        if not jobs:
            return
        before = self.clock_ns()
        results = self._forward(jobs, [[job.last_token] for job in jobs])
        spent = self.clock_ns() - before
        for job, logits in zip(jobs, results, strict=True):
            job.decode_steps += 1
            job.decode_ns += spent
            if isinstance(logits, Exception):
                self._fail(job, logits)
            else:
                self._take_token(job, logits)

    def _forward(
        self, jobs: Sequence[_Job[SessionT]], token_ids: Sequence[Sequence[int]]
    ) -> list[Tensor | Exception]:
        """Logits [1, V] or the error of each job. A failed batch is repeated one by one, to find whose fault it is."""
        try:
            return list(self._runner.forward([job.running() for job in jobs], token_ids))
        except Exception as error:
            if len(jobs) == 1:
                return [error]
            logger.warning("a batch of %d sessions failed (%s); stepping them one by one", len(jobs), error)
            return [self._forward([job], [ids])[0] for job, ids in zip(jobs, token_ids, strict=True)]

    def _take_token(self, job: _Job[SessionT], logits: Tensor) -> None:
        """Samples from logits [1, V], emits the token and ends the job when it was the last one."""
        request = job.request
        try:
            token_id = job.sampler.sample(logits[-1])
            ended = token_id in request.end_ids
            piece = None if ended else request.sink.push(token_id)
        except Exception as error:
            self._fail(job, error)
            return
        job.last_token = token_id
        job.generated += 1
        job.first_token_ns = job.first_token_ns or self.clock_ns()
        job.stream.put(Token(token_id, "" if piece is None else piece.text))
        if ended:
            self._finish(job, FinishReason.END_OF_SEQUENCE)
        elif piece is not None and piece.stopped:
            self._finish(job, FinishReason.STOP)
        elif job.generated >= request.max_tokens:
            self._finish(job, FinishReason.LENGTH)

    def _finish(self, job: _Job[SessionT], reason: FinishReason) -> None:
        try:
            figures = job.running().figures
            text = job.request.sink.flush()
        except Exception as error:
            self._fail(job, error)
            return
        times = Times(
            queue_ns=job.admitted_ns - job.submitted_ns,
            prompt_ns=job.prompt_done_ns - job.admitted_ns,
            first_token_ns=job.first_token_ns - job.submitted_ns,
            total_ns=self.clock_ns() - job.submitted_ns,
            decode_steps=job.decode_steps,
            decode_ns=job.decode_ns,
        )
        self._release(job)
        job.stream.put(Finished(reason, text, job.generated, job.sampler.seed, times, figures))

    def _fail(self, job: _Job[SessionT], error: Exception) -> None:
        self._release(job)
        job.stream.put(error)

    def _release(self, job: _Job[SessionT]) -> None:
        """Takes the job out of the queues and gives back all it held, before its reader learns of its end."""
        with self._changed:
            self._queues.remove(job)
            self._changed.notify_all()
        session, job.session = job.session, None
        closes = [] if session is None else [session.close]
        _call_all(*closes, job.request.on_close, job.place.release)


def _call_all(*releases: Callable[[], None]) -> None:
    """Calls each of them, whether those before it failed or not."""
    for release in releases:
        try:
            release()
        except Exception:
            logger.exception("releasing a request failed")
