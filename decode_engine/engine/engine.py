"""The scheduler: one thread that owns the model and advances all sessions step by step.

Every iteration drops ended requests, admits waiting ones, feeds at most one chunk of prompts and then takes one decode
step with all decoding sessions in a batch. So a short request streams while a long prompt is still being read, and
cancellation or a passed deadline ends a request's work within a step or two. Where the device chooses tokens itself, a
step may be in flight from one iteration to the next (`Flight`), and nobody's session is closed before it is done. In
which order requests are served, and how long a stream waits at most between two tokens, stands in `queues`.

The engine speaks token ids. Text reaches it only as the opaque result of a request's `TokenSink`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Generic

import torch
from torch import Tensor

from decode_engine.engine.job import Job, call_all, new_job
from decode_engine.engine.keeping import Keepers
from decode_engine.engine.places import Place, Places
from decode_engine.engine.prompt_pieces import Piece
from decode_engine.engine.queues import Pass, Queues
from decode_engine.engine.requests import (
    EngineStats,
    Finished,
    GiveWayError,
    PromptRead,
    Request,
    Runner,
    SessionT,
    Stream,
)
from decode_engine.engine.stepping import Flight, forward_each
from decode_engine.errors import (
    EngineCrashedError,
    SessionMemoryError,
    ShuttingDownError,
)
from index_store.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

_ADMISSIONS = 16
"""Requests admitted in one turn: making a session takes a little time, which streams wait for."""


class Engine(Generic[SessionT]):
    """Runs requests on a model. Thread-safe; `start` and `shutdown` are called once each."""

    def __init__(
        self,
        runner: Runner[SessionT],
        *,
        max_sessions: int = 16,
        max_waiting: int = 64,
        prompt_chunk: int = 256,
        session_memory: int | None = None,
        on_start: Callable[[], None] = lambda: None,
        on_crash: Callable[[BaseException], None] = lambda error: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """max_sessions: requests in progress at once. max_waiting: requests beyond those, loading or queued.

        prompt_chunk: most prompt tokens per step, of all prompts together; fewer where they cost more (`PromptCost`).
        session_memory: most bytes that requests in progress may need in sum (`Request.memory`); None has no bound.
        on_start: called first on the scheduler's thread. on_crash: told when the scheduler fails.
        Raises InvalidArgumentError for a limit out of range.
        """
        for name, value, least in (
            ("max_sessions", max_sessions, 1),
            ("max_waiting", max_waiting, 0),
            ("prompt_chunk", prompt_chunk, 1),
            ("session_memory", 1 if session_memory is None else session_memory, 1),
        ):
            if value < least:
                raise InvalidArgumentError(f"{name} is {value}, expected at least {least}", field=name)
        self._runner = runner
        self._flight = Flight(runner)
        self._prompt_chunk = prompt_chunk
        self._on_start = on_start
        self._on_crash = on_crash
        self.clock_ns = clock_ns
        self._changed = threading.Condition()
        self.max_sessions = max_sessions
        self._queues: Queues[SessionT] = Queues(max_sessions, session_memory)
        self._places = Places(max_sessions + max_waiting, max_waiting // 4)
        self._keepers = Keepers()
        self._stats = EngineStats()
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
        return self._places.total

    def stats(self) -> EngineStats:
        """What the engine does now, and did so far."""
        with self._changed:
            queues = self._queues
            return replace(
                self._stats,
                waiting=len(queues.waiting),
                prompting=len(queues.prompting),
                decoding=len(queues.decoding),
                requests=self._places.total,
                session_bytes=queues.held_bytes,
                session_limit_bytes=queues.memory,
            )

    def reserve(self, context: str = "", memory: int = 0) -> Place:
        """Takes the place of one request before it costs anything.

        context, memory: as in the request.
        Raises TooManyRequestsError when there is no place left for the context, and what `submit` raises when it would.
        """
        with self._changed:
            self._check_accepting()
            self._check_memory(memory)
            return self._places.take(context)

    def submit(self, place: Place, request: Request[SessionT]) -> Stream:
        """Queues a request. Its place and `on_close` are the engine's from here on, also when this raises.

        Raises InvalidArgumentError for an empty prompt, a token limit below one or a number of answers for which there
        are no sessions, SessionMemoryError for a request that needs more memory than there is for all,
        ShuttingDownError while the engine stops, EngineCrashedError when it failed.
        """
        try:
            if not request.prompt:
                raise InvalidArgumentError("the prompt has no tokens, expected at least one", field="prompt")
            if request.max_tokens < 1:
                raise InvalidArgumentError(
                    f"max_tokens is {request.max_tokens}, expected at least 1", field="max_tokens"
                )
            self.check_answers(request.answers)
            stream = Stream(self._wake, request.on_event, request.answers)
            job = new_job(request, place, stream, self.clock_ns(), self._prompt_chunk)
            with self._changed:
                self._check_accepting()
                self._check_memory(job.memory)
                self._queues.waiting.add(job)
                self._changed.notify_all()
        except Exception:
            call_all(request.on_close, place.release)
            raise
        return job.stream

    def on_context(self, context: str) -> int:
        """Sessions of requests on a context that wait or run, as many as they want answers."""
        with self._changed:
            return sum(job.sessions for job in self._queues.all() if job.request.context == context)

    def check_answers(self, answers: int) -> None:
        """Raises InvalidArgumentError unless there are sessions for so many answers to one request."""
        if not 1 <= answers <= self.max_sessions:
            raise InvalidArgumentError(
                f"n is {answers}, expected 1 to {self.max_sessions}, as many sessions as this server has "
                "(--max-sessions)",
                field="n",
            )

    def ahead(self, stream: Stream) -> int | None:
        """Requests to be admitted before that of the stream, if all have the memory; None if it does not wait."""
        with self._changed:
            return self._queues.waiting.ahead(stream)

    def shutdown(self, grace_s: float = 0.0) -> None:
        """Accepts nothing more, lets requests finish for `grace_s` seconds, ends the others and the thread."""
        with self._changed:
            self._accepting = False
            self._changed.wait_for(lambda: self._queues.empty or self._crash is not None, timeout=grace_s)
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._keepers.close()

    def _check_accepting(self) -> None:
        if self._crash is not None:
            raise EngineCrashedError("the scheduler failed and the server has to be restarted")
        if not self._accepting:
            raise ShuttingDownError("the server is shutting down and accepts no more requests")

    def _check_memory(self, needed: int) -> None:
        limit = self._queues.memory
        if limit is not None and needed > limit:
            raise SessionMemoryError(
                f"prompt and answer may need {needed} bytes, all sessions together have {limit}; shorten the prompt, "
                "lower max_tokens, or raise --session-memory",
                needed=needed,
                limit=limit,
            )

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
        fed = self._advance_prompts()
        batch = self._decode()
        with self._changed:
            self._stats = self._stats.after_turn(fed, batch)

    def give_way(self) -> None:
        """For sessions that wait, on the scheduler's thread, for a layer of a context that is being loaded.

        Raises GiveWayError when there is something else to do: the session is closed then, and made again in its turn.
        """
        now = self.clock_ns()
        with self._changed:
            running = self._queues.prompting[0] if self._queues.prompting else None
            ended = any(job.end(now) is not None for job in self._queues.all())
            if self._stopping or ended or running is None or self._queues.others_can_run(running):
                raise GiveWayError

    def _drop_ended(self) -> None:
        now = self.clock_ns()
        with self._changed:
            jobs = self._queues.all()
        for job in jobs:
            error = job.end(now)
            if error is not None:
                self._fail(job, error)
            elif job.loaded_ns is None and not job.request.loading():
                job.loaded_ns = now

    def _admit(self) -> None:
        for _ in range(_ADMISSIONS):
            with self._changed:
                job = self._queues.admit()
            if job is None:
                return
            job.admitted_ns = self.clock_ns()
            try:
                job.session = job.request.start()
            except Exception as error:
                self._fail(job, error)

    def _advance_prompts(self) -> int:
        """Feeds pieces of prompts; returns how many tokens these were."""
        with self._changed:
            passes = self._queues.take_passes(self._prompt_chunk)
        return sum(map(self._read_pass, passes))

    def _read_pass(self, pieces: Pass[SessionT]) -> int:
        """Feeds pieces of different prompts at once; returns how many tokens these were."""
        here = [
            (job, piece) for job, piece in pieces if job.session is not None
        ]  # the piece before ended others
        read = [(job, piece) for job, piece in here if not piece.stored]
        told = any(job.request.prompt_logprobs for job, _ in read)
        found = forward_each(
            partial(self._runner.read, all_logits=told),
            [job.running() for job, _ in read],
            [job.piece_ids(piece) for job, piece in read],
        )
        results = {job: result for (job, _), result in zip(read, found, strict=True)}
        for job, piece in here:
            try:
                self._take_piece(job, piece, results.get(job))
            except GiveWayError:
                self._put_back(job)
            except Exception as error:
                self._fail(job, error)
        return sum(piece.tokens for job, piece in read if isinstance(results[job], Tensor))

    def _take_piece(self, job: Job[SessionT], piece: Piece, result: Tensor | Exception | None) -> None:
        """Goes on behind a piece of a prompt. result: logits after it, or what went wrong; None of stored tokens."""
        if isinstance(result, Exception):
            raise result
        if result is None:
            job.restore(piece.tokens)
            return
        job.note_read(piece, result)
        if not job.unread:
            self._start_answers(job, result[-1])

    def _start_answers(self, job: Job[SessionT], logits_V: Tensor) -> None:
        """From the end of the prompt on, every answer has a session of its own."""
        job.prompt_done_ns = self.clock_ns()
        answers = job.fork()
        with self._changed:
            self._queues.start_decoding(job, answers)
        if job.request.prompt_logprobs:
            job.stream.put(PromptRead(job.prompt_logprobs))
        if job.prompt_only:
            self._finish(job, job.end_with_prompt())
            return
        for each in answers:
            try:
                token_id = each.sampler.sample(logits_V)
            except Exception as error:
                self._fail(each, error)
                return
            self._take_tokens([(each, token_id)])

    def _put_back(self, job: Job[SessionT]) -> None:
        """Has a job wait that cannot go on before its context is loaded. It has passed no layer that is not there."""
        session, job.session, job.read = job.session, None, 0
        job.prompt_logprobs.clear()
        with self._changed:
            self._queues.put_back(job)
        if session is not None:
            session.close()

    def _decode(self) -> int:
        """Takes one step with all that decode, or all that are in the step in flight; returns how many these are."""
        with self._changed:
            jobs = list(self._queues.decoding)
        batch: list[tuple[Job[SessionT], SessionT]] = []
        for job in jobs:
            try:
                batch.append((job, job.running()))
            except EngineCrashedError as error:
                self._fail(job, error)
        if not batch:
            return 0
        before = self.clock_ns()
        results = self._flight.step(
            [session for _, session in batch],
            [job.last_token for job, _ in batch],
            [job.sampler for job, _ in batch],
            follow=all(job.goes_on for job, _ in batch),
        )
        spent = self.clock_ns() - before
        stepped = [(job, each) for (job, _), each in zip(batch, results, strict=True) if each is not None]
        for job, _ in stepped:
            job.decode_steps += 1
            job.decode_ns += spent
        self._take_tokens((job, each) for job, each in stepped if not isinstance(each, Exception))
        for job, each in stepped:
            if isinstance(each, Exception):
                self._fail(job, each)
        return len(stepped)

    def _take_tokens(self, taken: Iterable[tuple[Job[SessionT], int]]) -> None:
        """Emits tokens, and then ends the jobs for which it was the last one: that may wait for a step in flight."""
        ended: list[tuple[Job[SessionT], Finished]] = []
        for job, token_id in taken:
            if job.session is None:  # another answer to its request failed
                continue
            try:
                finished = job.take(token_id, self.clock_ns())
            except Exception as error:
                self._fail(job, error)
                continue
            if finished is not None:
                ended.append((job, finished))
        for job, finished in ended:
            if job.session is not None:
                self._finish(job, finished)

    def _finish(self, job: Job[SessionT], finished: Finished) -> None:
        """Ends an answer; where its session is kept, when that is done."""
        keeping = job.request.keeping
        if keeping is None:
            self._tell_end(job, finished)
            return
        try:
            work = keeping.take(job.running(), job.tokens)
        except Exception as error:
            self._fail(job, error)
            return
        with self._changed:
            self._queues.start_keeping(job)
        self._close_session(job)
        self._keepers.keep(work, finished, partial(self._tell_end, job))

    def _tell_end(self, job: Job[SessionT], end: Finished | Exception) -> None:
        """Called by the scheduler's thread, or by one that keeps."""
        self._release(job)
        job.stream.put(end)

    def _fail(self, job: Job[SessionT], error: Exception) -> None:
        """Ends the job's request, with all of its answers."""
        if job not in job.live:
            return
        for each in list(job.live):
            self._release(each)
        job.stream.put(error)
        if isinstance(error, torch.AcceleratorError):
            torch.accelerator.synchronize()  # raises where the device is lost: then nothing can run any more

    def _release(self, job: Job[SessionT]) -> None:
        """Takes the job out of the queues and gives back all it held, before its reader learns of its end."""
        job.live.remove(job)
        with self._changed:
            self._queues.remove(job)
            self._changed.notify_all()
        self._close_session(job)
        if not job.live:
            call_all(job.request.on_close, job.place.release)

    def _close_session(self, job: Job[SessionT]) -> None:
        session, job.session = job.session, None
        if session is not None:
            self._flight.leave(session)
            with self._changed:
                self._stats = self._stats.after_session(session.figures)
            call_all(session.close)
