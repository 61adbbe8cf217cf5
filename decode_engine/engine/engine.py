"""The engine: takes requests from any thread, and has one thread that owns the model advance all of them.

What that thread does stands in `scheduler`, in which order in `queues`. The engine speaks token ids, never text.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic

import torch

from decode_engine.engine.job import Place, Places, Reply, Use, call_all, new_job
from decode_engine.engine.queues import Queues
from decode_engine.engine.requests import EngineStats, GiveWayError, Runner, SessionT, Work
from decode_engine.engine.scheduler import Scheduler
from decode_engine.errors import EngineCrashedError, SessionMemoryError, ShuttingDownError
from decode_engine.orders.events import Waits
from index_store.errors import InvalidArgumentError

_QUIET_S = 1.0

_SWITCH_S = 1e-4
"""How long a thread keeps the interpreter's lock from one that wants it. A step takes it some dozens of times, and
waits that long each time while another thread loads or compiles; 5 ms, as Python has it, would be many steps."""

logger = logging.getLogger(__name__)


class Engine(Generic[SessionT]):
    """Runs requests on a model. Thread-safe; `start` and `shutdown` are called once each."""

    def __init__(
        self,
        runner: Runner[SessionT],
        *,
        max_sessions: int = 16,
        max_waiting: int = 64,
        max_client_requests: int | None = None,
        prompt_chunk: int = 256,
        session_memory: int | None = None,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        on_start: Callable[[], None] = lambda: None,
        on_crash: Callable[[BaseException], None] = lambda error: None,
        on_idle: Callable[[], float | None] = lambda: None,
        on_step: Callable[[Sequence[SessionT], float], None] = lambda sessions, seconds: None,
        send: Callable[[], None] = lambda: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """max_sessions: requests in progress at once. max_waiting: requests beyond those, loading or queued.
        max_client_requests: of one client; None for all but a quarter of those that may wait.

        prompt_chunk: most prompt tokens per step, of all prompts together; fewer where they cost more (`PromptCost`).
        session_memory: most bytes that requests in progress may need in sum (`Work.memory`); None has no bound.
        weight: of a tenant, above 0: what it gets of admissions and prompts where others want more than there is.
        on_start: called first on the scheduler's thread. on_crash: told when the scheduler fails. on_idle: called there
        when there was nothing to do for a second; returns the seconds until it is called again, None for not before
        there was something. on_step: told which sessions decoded a token together, and in how many seconds.
        send: called after every turn, and whenever else requests were told something, by any thread.
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
        self._prompt_chunk = prompt_chunk
        self._on_start = on_start
        self._on_crash = on_crash
        self._on_idle = on_idle
        self._send = send
        self.clock_ns = clock_ns
        self._changed = threading.Condition()
        self.max_sessions, self.session_memory = max_sessions, session_memory
        self._queues: Queues[SessionT] = Queues(max_sessions, session_memory, weight)
        self._places = Places(max_sessions + max_waiting, max_waiting // 4, max_client_requests)
        self._scheduler = Scheduler(
            runner,
            self._queues,
            self._changed,
            prompt_chunk=prompt_chunk,
            clock_ns=clock_ns,
            on_step=on_step,
            send=send,
        )
        self._accepting = True
        self._stopping = False
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="decode-engine", daemon=True)

    def start(self) -> None:
        """Starts the scheduler's thread, for which others of the process give the interpreter's lock up soon."""
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self._accepting and self._crash is None

    @property
    def places(self) -> int:
        """Requests that are running, queued or about to be."""
        return self._places.total

    def stats(self) -> EngineStats:
        with self._changed:
            queues = self._queues
            return replace(
                self._scheduler.stats,
                waiting=len(queues.waiting),
                prompting=len(queues.prompting),
                decoding=len(queues.decoding),
                requests=self._places.total,
                session_bytes=queues.held_bytes,
                session_limit_bytes=queues.memory,
            )

    def reserve(
        self, context: str = "", memory: int = 0, client: str = "", tenant: str = "", use: Use | None = None
    ) -> Place:
        """Takes the place of one request before it costs anything.

        context, memory, client, tenant: as in the request. use: closed with the place; not where this raises.
        Raises TooManyRequestsError when there is no place left for context, client or tenant, and what `submit` raises
        when it would.
        """
        with self._changed:
            self._check_accepting()
            self._check_memory(memory)
            return self._places.take(context, client, tenant, use)

    def submit(self, place: Place, work: Work[SessionT], reply: Reply) -> None:
        """Queues work. Its place and `close` are the engine's from here on, also when this raises.

        Raises InvalidArgumentError for an empty prompt, a token limit below one or a number of answers for which there
        are no sessions, SessionMemoryError for a request that needs more memory than there is for all,
        ShuttingDownError while the engine stops, EngineCrashedError when it failed.
        """
        try:
            if not work.prompt:
                raise InvalidArgumentError("the prompt has no tokens, expected at least one", field="prompt")
            if work.max_tokens < 1:
                raise InvalidArgumentError(
                    f"max_tokens is {work.max_tokens}, expected at least 1", field="max_tokens"
                )
            self.check_answers(work.order.answers)
            job = new_job(work, place, reply, self.clock_ns(), self._prompt_chunk)
            with self._changed:
                self._check_accepting()
                self._check_memory(job.memory)
                self._queues.waiting.add(job)
                job.ahead = next(ahead for each, ahead in self._queues.waiting.ahead() if each is job)
                reply.tell(Waits("session", job.ahead))
                self._changed.notify_all()
        except Exception:
            call_all(work.close, place.release)
            raise

    def on_context(self, context: str) -> int:
        """Sessions of requests on a context that wait or run, as many as they want answers."""
        with self._changed:
            return sum(job.sessions for job in self._queues.all() if job.work.context == context)

    def check_answers(self, answers: int) -> None:
        """Raises InvalidArgumentError unless there are sessions for so many answers to one request."""
        if not 1 <= answers <= self.max_sessions:
            raise InvalidArgumentError(
                f"n is {answers}, expected 1 to {self.max_sessions}, as many sessions as this server has "
                "(--max-sessions)",
                field="n",
            )

    def shutdown(self, grace_s: float = 0.0, *, patience_s: float | None = None) -> bool:
        """Accepts nothing more, lets requests finish for `grace_s` seconds, ends the others and the thread.

        patience_s: for the step that the thread is in, which cannot be interrupted; None waits as long as it takes.
        Returns whether the thread has ended. If not, the requests are told all the same, but hold what they have.
        """
        with self._changed:
            self._accepting = False
            self._changed.wait_for(lambda: self._queues.empty or self._crash is not None, timeout=grace_s)
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(patience_s)
        if not self._thread.is_alive():
            self._scheduler.close()
            return True
        logger.warning("a step of the engine has not ended in %g s; its requests are told", patience_s)
        with self._changed:
            left = self._queues.all()
        for reply in {id(job.reply): job.reply for job in left}.values():
            reply.fail(self._last_words())
        self._send()
        return False

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

    def wake(self) -> None:
        """To be called when something was asked of a reply."""
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
            self._scheduler.fail_all(self._last_words())

    def _last_words(self) -> Exception:
        if self._crash is not None:
            return EngineCrashedError("the scheduler failed while it worked on this request")
        return ShuttingDownError("the server shut down before this request finished")

    def _wait_for_work(self) -> bool:
        pause_s: float | None = _QUIET_S
        while True:
            with self._changed:
                if self._changed.wait_for(self._has_work, pause_s):
                    return not self._stopping
                held = bool(self._queues.held)
            pause_s = _QUIET_S if held else self._on_idle()

    def _has_work(self) -> bool:
        queues = self._queues
        if self._stopping or queues.waiting or queues.prompting or queues.decoding:
            return True
        now = self.clock_ns()
        return any(job.reply.stops or job.end(now) is not None for job in queues.held)

    def step(self) -> None:
        """One turn of the scheduler; runs on its thread."""
        self._scheduler.turn()

    def give_way(self) -> None:
        """For sessions that wait, on the scheduler's thread, for a layer of a context that is being loaded.

        Raises GiveWayError when there is something else to do: the session is closed then, and made again in its turn.
        """
        now = self.clock_ns()
        self._send()
        with self._changed:
            running = self._queues.prompting[0] if self._queues.prompting else None
            ended = any(job.end(now) is not None for job in self._queues.all())
            if self._stopping or ended or running is None or self._queues.others_can_run(running):
                raise GiveWayError
