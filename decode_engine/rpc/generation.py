"""One Generate call: checked, given its place, brought to its context, streamed.

Who waits is told how it stands (`messages.notices`). Who is refused is given an appointment.
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
from decode_engine.engine.session_memory import fitting_tokens
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
from decode_engine.rpc.contexts.names import COLLECTION
from decode_engine.rpc.messages.describe import logprob_messages, summarise, token_messages
from decode_engine.rpc.messages.notices import Notices
from decode_engine.rpc.messages.validation import (
    Order,
    check_named_tokens,
    check_prompt,
    check_tokens,
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
from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.methods.method import FittedMethod, Method
from index_store.models.loading import Tokenizer
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.manifest import Manifest
from sparsekv.v1 import conversation_pb2, generation_pb2


@dataclass(frozen=True, slots=True)
class CheckedOrder:
    """An order and what it means on its context.

    ground: the context, and what is searched of it. fitted: the method on that. memory: bytes that the session of each
    answer may come to hold. arrived_ns: when the call came, on the engine's clock. sampling: the order's, with the
    constraint compiled. token_bytes: what tokens stand for; empty where no log probabilities are wanted. reason: why it
    is this method, where the server chose it. calls: how tools are called, where they may be. whole: all
    tokens of a request that names no context, of which the prompt is what is read.
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
    whole: Sequence[int] | None = None

    @property
    def cached(self) -> int:
        """Tokens that are not read, since their keys and values are stored."""
        stored = self.ground.named.token_count
        return stored if self.whole is None else len(self.whole) - len(self.prompt)

    @property
    def again(self) -> int:
        """1 where the prompt is the context's last token, which is read for what follows it; 0 elsewhere."""
        return self.ground.named.token_count - self.cached

    @property
    def context(self) -> str:
        """The resource name of the context; "" where there is none."""
        return COLLECTION + self.ground.named.id if self.ground.named.token_count else ""

    def usage(self, completion_tokens: int = 0) -> generation_pb2.Usage:
        """The tokens involved."""
        return generation_pb2.Usage(
            context_tokens=self.cached,
            prompt_tokens=len(self.prompt),
            completion_tokens=completion_tokens,
            cached_tokens=self.cached,
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
    ground = backend.ground(order.context_id) if whole is None else _beginning(backend, order, whole)
    named, base = ground.named, ground.base
    method, reason = _choose(backend, order, base)
    fitted = method.on(base)
    stored = StoredMessages(backend.store, named)
    if whole is None:
        prompt = prompt_tokens(order, tokenizer, named, identity, stored, check)
    else:
        prompt = whole[min(named.token_count, len(whole) - 1) :]
    check_prompt(order, prompt, identity)
    max_tokens = fit_max_tokens(order, named, identity, len(prompt))
    limit, least = backend.engine.session_memory, max(1, order.sampling.rules.min_tokens)
    room = None if limit is None else limit // order.answers - ground.own_bytes
    max_tokens, own = fitting_tokens(fitted, ground.own_tokens + len(prompt), least, max_tokens, room)
    memory = own + ground.own_bytes
    vocabulary, sampling = backend.runner.vocabulary, order.sampling
    calls = _plan_calls(order, tokenizer, identity, stored)
    constraint = order.constraint if calls is None else calls.constraint
    if constraint is not None:
        sampling = replace(sampling, grammar=vocabulary.compile(constraint))
    token_bytes = vocabulary.token_bytes if order.tells_logprobs else ()
    return CheckedOrder(
        order,
        ground,
        fitted,
        prompt,
        max_tokens,
        memory,
        arrived_ns,
        sampling,
        token_bytes,
        reason,
        calls,
        whole,
    )


def _whole_tokens(
    order: Order, tokenizer: Tokenizer, identity: ModelIdentity, check: Callable[[], None]
) -> list[int]:
    """All tokens of a request that names no context. Raises PromptTooLongError, InvalidArgumentError."""
    if order.text is not None:
        return document_tokens(order.text, tokenizer, identity, check)
    if order.token_ids:
        check_document(len(order.token_ids), identity)
        check_tokens("token_ids", order.token_ids, identity)
        return list(order.token_ids)
    said = "\n".join(turn.content for turn in order.turns)
    check_document(tokenizer.at_least(said, identity.max_positions, check), identity)
    return conversation_tokens(order.turns, order.tools, tokenizer)


def _beginning(backend: ServiceBackend, order: Order, whole: Sequence[int]) -> Ground:
    """What a request stands on that names no context. Raises InvalidArgumentError where nothing can be kept of it."""
    if order.prompt_logprobs:  # all of the prompt has to be read
        return backend.nothing
    if order.keep is None:
        return backend.beginning(whole)
    ground = backend.beginning(whole[:-1])
    if not ground.named.token_count:
        raise InvalidArgumentError(
            "keep continues a stored context, and this prompt begins with none; name one, or have the prompt made into "
            "a context first (CreateContext)",
            field="keep",
        )
    return ground


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
    if not base.token_count:
        method = choose_method(order, base)
        if method.sparse:
            raise MethodUnsupportedError(
                f"method {order.method!r} searches a stored context, and this prompt begins with none; name a context, "
                "or leave the method out",
                method=order.method,
            )
        return method, ""
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
    bell, notices = Bell(), Notices(checked.usage())
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
                woken = await bell.wait(notices.due_in_s())
                if not woken and (notice := notices.of_ahead(backend.engine.ahead(stream))):
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
        checked, usage = self.checked, self.checked.usage(end.completion_tokens)
        made = (checked.fitted.method, usage, self.load_ns, self.before_ns, checked.reason, checked.context)
        summary = summarise(end, *made)
        message = generation_pb2.GenerateResponse(text=end.text, summary=summary, index=end.answer)
        self._tell_calls(message)
        if (reader := self._readers.get(end.answer)) is not None:
            message.text += reader.flush()
            if reader.finished and end.reason is not FinishReason.LENGTH:
                message.summary.finish_reason = generation_pb2.GenerationSummary.TOOL_CALLS
        for name in ("queue", "first_token", "total"):
            note(**{f"{name}_ms": getattr(summary.timings, f"{name}_ns") / 1e6})
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


def _submit(
    backend: ServiceBackend, checked: CheckedOrder, call: Call, place: Place, ring: Callable[[], None]
) -> tuple[Stream, int, int]:
    """Has the context loaded, and queues the request. The place is left to the caller if that fails.

    While other contexts that are in use leave no memory for it, or its method is being prepared, the call waits; its
    place bounds how many do. Returns the stream, the nanoseconds of loading, which may go on, and the time of
    submission. The context's lease goes over to the engine, which ends it when it has let go of the session.
    """
    id_ = checked.fitted.manifest.id
    clock_ns = backend.engine.clock_ns
    with ExitStack() as stack:
        before = clock_ns()
        store, ground, runner = backend.store, checked.ground, backend.runner
        resident = runner.no_context
        placement = resident.placement
        if ground.base.token_count:
            placement = backend.arena.placement(checked.fitted.manifest)
        backend.preparation.begin(checked.fitted, placement)  # while the context is brought into memory
        if ground.base.token_count:
            lease = backend.arena.acquire(
                store, id_, check=call.check, wait_for_memory=True, early=True, expired=ground.own_tokens > 0
            )
            resident = stack.enter_context(lease)
        own, again = ground.read(store), checked.again
        if own is not None and again:
            own, again = own.first(ground.own_tokens - again), 0
        backend.preparation.wait(checked.fitted, resident.placement, call.check)
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
            start=lambda: runner.start(resident, checked.fitted, backend.engine.give_way, again),
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
            before=() if checked.whole is None else checked.whole[: checked.cached],
            prompt_logprobs=checked.order.prompt_logprobs,
            on_close=stack.pop_all().close,  # last: until here, what fails ends the lease
        )
    stream = backend.engine.submit(place, request)
    if checked.whole is not None:
        backend.beginnings.note(checked.whole, ground.named, checked.cached)
    return stream, submitted_ns - before, submitted_ns


def _deadline_ns(call: Call, now_ns: int) -> int | None:
    """When the call's deadline passes, on the engine's clock; None without a deadline."""
    if call.deadline_s is None:
        return None
    return now_ns + int((call.deadline_s - time.monotonic()) * 1e9)
