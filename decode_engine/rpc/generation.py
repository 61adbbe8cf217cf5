"""One Generate call: checked, given its place, brought to its context, streamed.

Who waits is told how it stands: a message without tokens after a quarter of a second, then at every change, and now
and then in between, so that neither people nor idle connections give up. Who is refused is given an appointment.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from decode_engine.engine.places import Place
from decode_engine.engine.requests import Finished, FinishReason, Request, Stream, Token
from decode_engine.engine.session_memory import session_bytes
from decode_engine.engine.text import TextStream
from decode_engine.errors import TooManyRequestsError
from decode_engine.rpc.backend import ServiceBackend
from decode_engine.rpc.describe import describe_remainder
from decode_engine.rpc.transport.calls import Call
from decode_engine.rpc.transport.stalled import forget_error
from decode_engine.rpc.validation import Order, choose_method, fit_max_tokens, parse_order, prompt_tokens
from index_store.methods.method import FittedMethod
from sparsekv.v1 import generation_pb2

_FIRST_NOTICE_S = 0.25
_NOTICE_S = 1.0
_LONGEST_SILENCE_S = 10.0
_LONGEST_DELAY_S = 60.0

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.GenerationSummary.STOP,
    FinishReason.LENGTH: generation_pb2.GenerationSummary.LENGTH,
    FinishReason.END_OF_SEQUENCE: generation_pb2.GenerationSummary.END_OF_SEQUENCE,
}


class Clients:
    """How many requests each client address has here, at most `limit`. To be used on one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests: Counter[str] = Counter()

    @contextmanager
    def place(self, host: str) -> Iterator[None]:
        """One request of a client, while the block runs. Raises TooManyRequestsError."""
        own = self._requests[host]
        if own >= self._limit:
            raise TooManyRequestsError(
                f"{own} requests of this client are running or waiting, which is the limit for one client; try again "
                "later",
                limit=self._limit,
            )
        self._requests[host] += 1
        try:
            yield
        finally:
            self._requests[host] -= 1
            if not self._requests[host]:
                del self._requests[host]


class Appointments:
    """When to come again, for those who are refused: one after the other, as fast as places have become free lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interval_s = 1.0
        self._freed = clock()
        self._given = 0.0

    def place_freed(self) -> None:
        """A request has ended."""
        now = self._clock()
        between = min(max(now - self._freed, 0.01), 10.0)
        self._freed = now
        self._interval_s += 0.2 * (between - self._interval_s)

    def next_s(self) -> float:
        """Seconds until the next free appointment, which is taken by this."""
        now = self._clock()
        self._given = min(max(now, self._given) + self._interval_s, now + _LONGEST_DELAY_S)
        return self._given - now


class Bell:
    """Wakes a coroutine from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._rung = False

    def ring(self) -> None:
        """Wakes who waits, or will; from any thread. Ringing twice costs no more than once."""
        if not self._rung:
            self._rung = True
            try:
                self._loop.call_soon_threadsafe(self._event.set)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def clear(self) -> None:
        """To be called before looking at what the bell is rung for."""
        self._event.clear()
        self._rung = False

    async def wait(self, timeout_s: float | None) -> bool:
        """Whether it rang in time."""
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class CheckedOrder:
    """An order and what it means on its context.

    fitted: the method on the context. memory: bytes that its session may come to hold. arrived_ns: when the call came,
    on the engine's clock.
    """

    order: Order
    fitted: FittedMethod
    prompt: list[int]
    max_tokens: int
    memory: int
    arrived_ns: int

    def usage(self, completion_tokens: int = 0) -> generation_pb2.Usage:
        """The tokens involved."""
        return generation_pb2.Usage(
            context_tokens=self.fitted.manifest.token_count,
            prompt_tokens=len(self.prompt),
            completion_tokens=completion_tokens,
        )


def check_request(
    backend: ServiceBackend, request: generation_pb2.GenerateRequest, check: Callable[[], None]
) -> CheckedOrder:
    """Checks a request against its context, before anything is loaded. check: raises when nobody waits any more."""
    arrived_ns = backend.engine.clock_ns()
    order = parse_order(request)
    manifest = backend.servable(order.context_id)
    method = choose_method(order, manifest, None if order.method else backend.tuned_default(manifest.id))
    fitted = method.on(manifest)
    identity = backend.runner.identity
    prompt = prompt_tokens(order, backend.runner.tokenizer, manifest, identity, check)
    max_tokens = fit_max_tokens(order, manifest, identity, len(prompt))
    memory = session_bytes(fitted, len(prompt) + max_tokens)
    return CheckedOrder(order, fitted, prompt, max_tokens, memory, arrived_ns)


async def stream_answer(
    backend: ServiceBackend, checked: CheckedOrder, call: Call, appointments: Appointments
) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
    """All messages of a request that was checked. Raises TooManyRequestsError, and what ends the request.

    appointments: are told when the request has ended.
    """
    place = backend.engine.reserve(checked.fitted.manifest.id, checked.memory)
    call.when_ended(appointments.place_freed)
    bell, notices = Bell(), _Notices(checked)
    submission = asyncio.ensure_future(
        call.run_alone(partial(_submit, backend, checked, call, place, bell.ring))
    )
    submission.add_done_callback(forget_error)
    while not submission.done():
        await asyncio.wait({submission}, timeout=notices.due_in_s())
        if not submission.done() and (notice := notices.take(generation_pb2.Waiting.CONTEXT, 0)):
            yield notice
    stream, load_ns, submitted_ns = submission.result()
    generated = 0
    finished = False
    while not finished:
        bell.clear()
        events = stream.take()
        if not events and generated:
            await bell.wait(None)
        elif not events:
            if not await bell.wait(notices.due_in_s()) and (notice := notices.of(backend, stream)):
                yield notice
        else:
            tokens = [event for event in events if isinstance(event, Token)]
            if tokens:
                first = not generated and not notices.told
                generated += len(tokens)
                call.note(generated_tokens=generated)
                yield _token_message(tokens, checked.usage() if first else None)
            last = events[-1]
            if isinstance(last, Exception):
                raise last
            if isinstance(last, Finished):
                summary = _summarise(checked, last, load_ns, submitted_ns - checked.arrived_ns)
                times = summary.timings
                call.note(
                    queue_ms=times.queue_ns / 1e6,
                    first_token_ms=times.first_token_ns / 1e6,
                    total_ms=times.total_ns / 1e6,
                )
                yield generation_pb2.GenerateResponse(text=last.text, summary=summary)
                finished = True


class _Notices:
    """What a request without tokens is told, and when."""

    def __init__(self, checked: CheckedOrder) -> None:
        self.told = False
        self._checked = checked
        self._due = time.monotonic() + _FIRST_NOTICE_S
        self._last: tuple[generation_pb2.Waiting.Cause | None, int] | None = None
        self._said = 0.0

    def due_in_s(self) -> float:
        """Seconds until there may be something to tell."""
        return max(self._due - time.monotonic(), 0.0)

    def of(self, backend: ServiceBackend, stream: Stream) -> generation_pb2.GenerateResponse | None:
        """The next notice of a request in the engine, if there is news."""
        ahead = backend.engine.ahead(stream)
        return self.take(None, 0) if ahead is None else self.take(generation_pb2.Waiting.SESSION, ahead)

    def take(
        self, cause: generation_pb2.Waiting.Cause | None, ahead: int
    ) -> generation_pb2.GenerateResponse | None:
        """The next notice: None before its time, and where there is no news. cause None: it waits no longer."""
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + _NOTICE_S
        if self._last == (cause, ahead) and now - self._said < _LONGEST_SILENCE_S:
            return None
        usage = None if self.told else self._checked.usage()
        self._last, self._said, self.told = (cause, ahead), now, True
        waiting = None if cause is None else generation_pb2.Waiting(cause=cause, requests_ahead=ahead)
        return generation_pb2.GenerateResponse(usage=usage, waiting=waiting)


def _token_message(
    tokens: Sequence[Token], usage: generation_pb2.Usage | None
) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        token_ids=[token.token_id for token in tokens],
        text="".join(token.text for token in tokens),
        usage=usage,
    )


def _submit(
    backend: ServiceBackend, checked: CheckedOrder, call: Call, place: Place, ring: Callable[[], None]
) -> tuple[Stream, int, int]:
    """Has the context loaded, and queues the request. The place is given back if that fails.

    While other contexts that are in use leave no memory for it, the call waits; its place bounds how many do. The
    engine gets it while its context is still being loaded.
    Returns the stream, the nanoseconds of loading and the time of submission. The context's lease goes over to the
    engine, which ends it when it has let go of the session.
    """
    id_ = checked.fitted.manifest.id
    clock_ns = backend.engine.clock_ns
    with ExitStack() as stack:
        stack.callback(place.release)
        before = clock_ns()
        lease = backend.arena.acquire(backend.store, id_, check=call.check, wait_for_memory=True, early=True)
        resident = stack.enter_context(lease)
        submitted_ns = clock_ns()
        tokenizer = backend.runner.tokenizer
        request: Request[Any] = Request(
            start=lambda: backend.runner.start(resident, checked.fitted, backend.engine.give_way),
            prompt=checked.prompt,
            max_tokens=checked.max_tokens,
            sampling=checked.order.sampling,
            sink=TextStream(tokenizer.decode, checked.prompt, checked.order.stops),
            end_ids=frozenset(tokenizer.eos_ids),
            deadline_ns=_deadline_ns(call, submitted_ns),
            on_close=stack.pop_all().close,
            on_event=ring,
            context=id_,
            memory=checked.memory,
            loading=lambda: resident.loading,
            cost=backend.runner.prompt_cost(checked.fitted),
        )
    stream = backend.engine.submit(place, request)
    call.when_ended(stream.cancel)
    return stream, submitted_ns - before, submitted_ns


def _deadline_ns(call: Call, now_ns: int) -> int | None:
    """When the call's deadline passes, on the engine's clock; None without a deadline."""
    if call.deadline_s is None:
        return None
    return now_ns + int((call.deadline_s - time.monotonic()) * 1e9)


def _summarise(
    checked: CheckedOrder, end: Finished, load_ns: int, before_ns: int
) -> generation_pb2.GenerationSummary:
    """The last message's summary. before_ns: from the arrival of the call to the submission to the engine."""
    times, figures, method = end.times, end.figures, checked.fitted.method
    searched = figures.sparse_available > 0
    return generation_pb2.GenerationSummary(
        finish_reason=_FINISH_REASONS[end.reason],
        usage=checked.usage(end.completion_tokens),
        timings=generation_pb2.Timings(
            load_ns=load_ns + times.load_ns,
            queue_ns=times.queue_ns,
            prompt_ns=times.prompt_ns,
            first_token_ns=before_ns + times.first_token_ns,
            search_ns=figures.search_ns,
            gather_ns=figures.gather_ns,
            attend_ns=figures.attend_ns,
            append_ns=figures.append_ns,
            decode_steps=times.decode_steps,
            decode_ns=times.decode_ns,
            total_ns=before_ns + times.total_ns,
            device_wait_for_host_ns=figures.device_wait_for_host_ns,
            host_bytes_read=figures.host_bytes_read,
            rows_reused=figures.rows_reused,
        ),
        selection=generation_pb2.SelectionFigures(
            searches=figures.searches,
            keys_kept=figures.kept,
            keys_attended=figures.sparse_attended,
            keys_available=figures.sparse_available,
            fraction_sparse=figures.sparse_fraction if searched else None,
            fraction_all=figures.fraction,
        ),
        method=method.name,
        seed=end.seed,
        budget="" if method.budget is None else method.budget.label,
        remainder=describe_remainder(method),
    )
