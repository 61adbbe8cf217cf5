"""One Generate call: checked, given its place, brought to its context, streamed.

Who waits is told how it stands: a message without tokens after a quarter of a second, then at every change, and now
and then in between, so that neither people nor idle connections give up. Who is refused is given an appointment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from decode_engine.engine.places import Place
from decode_engine.engine.requests import Event, Finished, FinishReason, PromptRead, Request, Stream, Token
from decode_engine.engine.sampler import SamplingParameters
from decode_engine.engine.session_memory import session_bytes
from decode_engine.engine.text import TextStream
from decode_engine.model.continuing import (
    Ground,
    SessionKeeper,
    check_document,
    document_tokens,
    stored_tokens,
)
from decode_engine.model.method_choice import AUTO
from decode_engine.rpc.backend import ServiceBackend
from decode_engine.rpc.messages.describe import logprob_messages, summarise, token_messages
from decode_engine.rpc.messages.validation import (
    Order,
    check_named_tokens,
    check_prompt,
    choose_method,
    fit_max_tokens,
    parse_order,
    prompt_tokens,
)
from decode_engine.rpc.prompts.stored_messages import StoredMessages
from decode_engine.rpc.prompts.tool_fields import CallMode, CallPlan, plan_calls
from decode_engine.rpc.prompts.turn_tokens import conversation_tokens
from decode_engine.rpc.transport.appointments import Appointments, Bell
from decode_engine.rpc.transport.calls import Call
from index_store.methods.method import FittedMethod, Method
from index_store.models.loading import Tokenizer
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.manifest import Manifest
from sparsekv.v1 import conversation_pb2, generation_pb2

_FIRST_NOTICE_S = 0.25
_NOTICE_S = 1.0
_LONGEST_SILENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class CheckedOrder:
    """An order and what it means on its context.

    ground: the context, and what is searched of it. fitted: the method on that. memory: bytes that the session of each
    answer may come to hold. arrived_ns: when the call came, on the engine's clock. sampling: the order's, with the
    constraint compiled. token_bytes: what tokens stand for; empty where no log probabilities are wanted. reason: why it
    is this method, where the server chose it. calls: how tools are called, where they may be.
    """

    order: Order
    ground: Ground
    fitted: FittedMethod
    prompt: list[int]
    max_tokens: int
    memory: int
    arrived_ns: int
    sampling: SamplingParameters
    token_bytes: Sequence[bytes]
    reason: str
    calls: CallPlan | None = None

    def usage(self, completion_tokens: int = 0) -> generation_pb2.Usage:
        """The tokens involved."""
        return generation_pb2.Usage(
            context_tokens=self.ground.named.token_count,
            prompt_tokens=len(self.prompt),
            completion_tokens=completion_tokens,
            cached_tokens=self.ground.named.token_count,
            max_tokens=self.max_tokens,
        )


def check_request(
    backend: ServiceBackend, request: generation_pb2.GenerateRequest, check: Callable[[], None]
) -> CheckedOrder:
    """Checks a request against its context, before anything is loaded. check: raises when nobody waits any more.

    A constraint is compiled here, which may take seconds.
    """
    arrived_ns = backend.engine.clock_ns()
    order = parse_order(request)
    backend.engine.check_answers(order.answers)
    check_named_tokens(order, backend.runner.identity)
    identity, tokenizer = backend.runner.identity, backend.runner.tokenizer
    whole = None if order.context_id else _whole_tokens(order, tokenizer, identity, check)
    ground = backend.ground(order.context_id if whole is None else backend.longest_prefix(whole).id)
    named, base = ground.named, ground.base
    method, reason = _choose(backend, order, base)
    fitted = method.on(base)
    stored = StoredMessages(backend.store, named)
    if whole is None:
        prompt = prompt_tokens(order, tokenizer, named, identity, stored, check)
    else:
        prompt = whole[named.token_count :]
    check_prompt(order, prompt, identity)
    max_tokens = fit_max_tokens(order, named, identity, len(prompt))
    memory = session_bytes(fitted, ground.own_tokens + len(prompt) + max_tokens) + ground.own_bytes
    vocabulary, sampling = backend.runner.vocabulary, order.sampling
    calls = _plan_calls(order, tokenizer, identity, stored)
    constraint = order.constraint if calls is None else calls.constraint
    if constraint is not None:
        sampling = replace(sampling, grammar=vocabulary.compile(constraint))
    token_bytes = vocabulary.token_bytes if order.tells_logprobs else ()
    return CheckedOrder(
        order, ground, fitted, prompt, max_tokens, memory, arrived_ns, sampling, token_bytes, reason, calls
    )


def _whole_tokens(
    order: Order, tokenizer: Tokenizer, identity: ModelIdentity, check: Callable[[], None]
) -> list[int]:
    """All tokens of a request that names no context. Raises PromptTooLongError, InvalidArgumentError."""
    if order.text is not None:
        return document_tokens(order.text, tokenizer, identity, check)
    said = "\n".join(turn.content for turn in order.turns)
    check_document(tokenizer.at_least(said, identity.max_positions, check), identity)
    return conversation_tokens(order.turns, order.tools, tokenizer)


def _plan_calls(
    order: Order, tokenizer: Tokenizer, identity: ModelIdentity, stored: StoredMessages
) -> CallPlan | None:
    """How tools are called: those of the request, or else of the context."""
    tools = order.tools
    if order.choice.mode is not CallMode.NONE and not tools and order.context_id:
        before = stored.conversation()
        tools = () if before is None else before.conversation.tools
    return plan_calls(order.choice, tools, tokenizer, identity.name)


def _choose(backend: ServiceBackend, order: Order, base: Manifest) -> tuple[Method, str]:
    """The method of an order, and why where the server chose it; "" where the client or the context did."""
    left_open = order.method in ("", AUTO)
    own = choose_method(order, base, backend.tuned_default(base.id) if left_open else None)
    if not left_open or not (order.method or backend.auto):
        return own, ""
    if order.has_budget or order.search_period is not None:
        return own, "the context's own, as the request sets its budget or search period"
    if order.keep is not None or (order.sampling.seed is not None and not order.sampling.greedy):
        return own, "the context's own, as a seed, or what is kept, may depend on no times"
    sessions = backend.engine.on_context(base.id) + order.answers
    return backend.costs.choose(own, base, backend.arena.placement(base), sessions)


async def stream_answer(
    backend: ServiceBackend,
    checked: CheckedOrder,
    call: Call,
    appointments: Appointments,
    note: Callable[..., None],
) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
    """All messages of a request that was checked. Raises TooManyRequestsError, and what ends the request.

    appointments: are told when the request has ended. note: is told what happened to it.
    """
    place = backend.engine.reserve(checked.fitted.manifest.id, checked.memory * checked.order.answers)
    bell, notices = Bell(), _Notices(checked)
    submission = asyncio.ensure_future(
        call.run_alone(partial(_submit, backend, checked, call, place, bell.ring))
    )
    try:
        while not submission.done():
            await asyncio.wait({submission}, timeout=notices.due_in_s())
            if not submission.done() and (notice := notices.take(generation_pb2.Waiting.CONTEXT, 0)):
                yield notice
        stream, load_ns, submitted_ns = submission.result()
        generated, left = 0, checked.order.answers
        told = _Told(checked, load_ns, submitted_ns - checked.arrived_ns)
        while left:
            bell.clear()
            events = stream.take()
            if not events and generated:
                await bell.wait(None)
            elif not events:
                if not await bell.wait(notices.due_in_s()) and (notice := notices.of(backend, stream)):
                    yield notice
            else:
                first = not generated and not notices.told
                generated += sum(isinstance(event, Token) for event in events)
                note(generated_tokens=generated)
                for message in await told.messages(events, call, note):
                    if first:
                        message.usage.CopyFrom(checked.usage())
                        first, notices.told = False, True
                    yield message
                last = events[-1]
                if isinstance(last, Exception):
                    raise last
                left -= sum(isinstance(event, Finished) for event in events)
    finally:  # the call may go on with other requests
        submission.add_done_callback(partial(_end, place))
        appointments.place_freed()


def _end(place: Place, submission: asyncio.Future[tuple[Stream, int, int]]) -> None:
    """Ends the request, which is harmless when it has ended; gives its place back where none was submitted."""
    if submission.cancelled() or submission.exception() is not None:
        place.release()
    else:
        stream, _, _ = submission.result()
        stream.cancel()


class _Told:
    """What clients are told of what happened to a request."""

    def __init__(self, checked: CheckedOrder, load_ns: int, before_ns: int) -> None:
        """before_ns: see `summarise`."""
        self.checked = checked
        self.load_ns = load_ns
        self.before_ns = before_ns
        plan, answers = checked.calls, range(checked.order.answers)
        self._readers = {} if plan is None else {answer: plan.reader() for answer in answers}

    async def messages(
        self, events: Sequence[Event | Exception], call: Call, note: Callable[..., None]
    ) -> list[generation_pb2.GenerateResponse]:
        """Of events that came together: an answer's tokens before its end."""
        bytes_of = self.checked.token_bytes
        messages = []
        for event in events:
            if isinstance(event, PromptRead):
                # A thread of its own: a request that has begun is not refused since others want the common ones.
                logprobs = await call.run_alone(partial(logprob_messages, event.logprobs, bytes_of))
                messages.append(generation_pb2.GenerateResponse(prompt_logprobs=logprobs))
        said = token_messages([event for event in events if isinstance(event, Token)], bytes_of)
        for message in said:
            self._tell_calls(message)
        messages += said
        messages += [self._ending(event, note) for event in events if isinstance(event, Finished)]
        return messages

    def _ending(self, end: Finished, note: Callable[..., None]) -> generation_pb2.GenerateResponse:
        usage, method = self.checked.usage(end.completion_tokens), self.checked.fitted.method
        summary = summarise(end, method, usage, self.load_ns, self.before_ns, self.checked.reason)
        message = generation_pb2.GenerateResponse(text=end.text, summary=summary, index=end.answer)
        self._tell_calls(message)
        if (reader := self._readers.get(end.answer)) is not None:
            message.text += reader.flush()
            if reader.finished and end.reason is not FinishReason.LENGTH:
                message.summary.finish_reason = generation_pb2.GenerationSummary.TOOL_CALLS
        times = summary.timings
        note(
            queue_ms=times.queue_ns / 1e6,
            first_token_ms=times.first_token_ns / 1e6,
            total_ms=times.total_ns / 1e6,
        )
        return message

    def _tell_calls(self, message: generation_pb2.GenerateResponse) -> None:
        """Tells calls in the message's text from what else is said."""
        reader = self._readers.get(message.index)
        if reader is not None:
            message.text, parts = reader.push(message.text)
            message.tool_calls.extend(
                conversation_pb2.ToolCallPart(
                    index=part.index, id=part.id, name=part.name, arguments_json=part.arguments
                )
                for part in parts
            )


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


def _submit(
    backend: ServiceBackend, checked: CheckedOrder, call: Call, place: Place, ring: Callable[[], None]
) -> tuple[Stream, int, int]:
    """Has the context loaded, and queues the request. The place is left to the caller if that fails.

    While other contexts that are in use leave no memory for it, the call waits; its place bounds how many do. The
    engine gets it while its context is still being loaded.
    Returns the stream, the nanoseconds of loading and the time of submission. The context's lease goes over to the
    engine, which ends it when it has let go of the session.
    """
    id_ = checked.fitted.manifest.id
    clock_ns = backend.engine.clock_ns
    with ExitStack() as stack:
        before = clock_ns()
        store, ground, runner = backend.store, checked.ground, backend.runner
        lease = backend.arena.acquire(
            store, id_, check=call.check, wait_for_memory=True, early=True, expired=ground.own_tokens > 0
        )
        resident = stack.enter_context(lease)
        own = ground.read(store)
        keeping = None
        if checked.order.keep is not None:
            base = (ground, checked.fitted, resident, own)
            options = replace(checked.order.keep, owner=call.caller)
            keeping = SessionKeeper(store, runner, *base, checked.prompt, options).keeping()
        submitted_ns = clock_ns()
        decode, plan = runner.tokenizer.decode, checked.calls
        if plan is not None and plan.shown:
            decode = partial(decode, shown=plan.shown)
        request: Request[Any] = Request(
            start=lambda: runner.start(resident, checked.fitted, backend.engine.give_way),
            prompt=checked.prompt,
            max_tokens=checked.max_tokens,
            sampling=checked.sampling,
            sink=TextStream(decode, checked.prompt, checked.order.stops, checked.sampling.rules.min_tokens),
            end_ids=frozenset(runner.tokenizer.eos_ids),
            deadline_ns=_deadline_ns(call, submitted_ns),
            on_event=ring,
            context=id_,
            memory=checked.memory,
            loading=lambda: resident.loading,
            cost=runner.prompt_cost(checked.fitted, ground.own_tokens),
            stored=None if own is None else stored_tokens(runner, checked.fitted, own),
            keeping=keeping,
            answers=checked.order.answers,
            stop_ids=checked.order.stop_token_ids,
            prompt_logprobs=checked.order.prompt_logprobs,
            on_close=stack.pop_all().close,  # last: until here, what fails ends the lease
        )
    return backend.engine.submit(place, request), submitted_ns - before, submitted_ns


def _deadline_ns(call: Call, now_ns: int) -> int | None:
    """When the call's deadline passes, on the engine's clock; None without a deadline."""
    if call.deadline_s is None:
        return None
    return now_ns + int((call.deadline_s - time.monotonic()) * 1e9)
