"""Answers at a door, over plain values: what gRPC turns into messages, and HTTP into its own shapes.

`Answering.answer` takes a checked order and yields what is said of it, as it comes:

    door = Answering(core, facts, store, tokenizer, vocabulary, sharing)
    async with aclosing(door.answer(order, call)) as answer:
        async for said in answer:
            ...

`call` is whoever asks (`Asker`). Closing the generator, or cancelling the task that reads it,
ends the request. Errors are raised, as the classes that they are everywhere. Who reads slowly holds nobody up: what
comes meanwhile waits here, and who never reads is ended by the gate.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Literal, TypeVar

from msgspec.structs import replace

from decode_engine.engine.sampling.constraints import Vocabulary
from decode_engine.errors import TooManyRequestsError
from decode_engine.orders.events import (
    Begins,
    Core,
    Ends,
    Event,
    Facts,
    Fails,
    Handle,
    Looks,
    PromptRead,
    Says,
    TokenLogprob,
    Waits,
    error_of_event,
)
from decode_engine.orders.order import Order, Traced
from decode_engine.rpc.answers.prompting import (
    CallPlan,
    StoredMessages,
    check_named_tokens,
    check_prompt,
    plan_calls,
    prompt_tokens,
    whole_tokens,
)
from decode_engine.rpc.answers.text import TextStream
from decode_engine.rpc.door.access import Sharing
from decode_engine.rpc.transport.asker import Asker
from decode_engine.rpc.transport.work import Appointments, Bound
from index_store.models.conversation.call_syntax import CallPart
from index_store.models.tokenizer import Tokenizer
from index_store.store.catalog import Store
from sparsekv.v1.values import Explanation, Usage

_FIRST_NOTICE_S = 0.25
_NOTICE_S = 1.0
_LONGEST_SILENCE_S = 10.0


class Notices:
    """Those of one request."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _FIRST_NOTICE_S
        self._last: Waits | None = None
        self._said = 0.0

    def due_in_s(self) -> float:
        """Seconds until there may be something to tell."""
        return max(self._due - time.monotonic(), 0.0)

    def take(self, waits: Waits) -> bool:
        """Whether to tell this now: neither before its time, nor where it is no news."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + _NOTICE_S
        if self._last == waits and now - self._said < _LONGEST_SILENCE_S:
            return False
        self._last, self._said = waits, now
        return True


def explanation(order: Order, begins: Begins, end: Ends, before_ns: int) -> Explanation:
    """Of an answer. before_ns: from the arrival of the call to that of the order at the engine."""
    missed, times = begins.missed, end.times
    audited = end.figures.get("audited", 0)
    chosen = (
        "the request names it" if order.method else "it is what the context, or the server, has for requests"
    )
    return Explanation(
        begins.lookup,
        begins.context,
        begins.cached,
        "" if missed is None else missed.reason,
        "" if missed is None else missed.context,
        0 if missed is None else missed.tokens,
        begins.tier,
        begins.method,
        begins.reason or chosen,
        before_ns / 1e6,
        times.load_ns / 1e6,
        times.queue_ns / 1e6,
        times.prompt_ns / 1e6,
        times.after_prompt_ns / 1e6,
        audited,
        end.figures["audited_kl_nanonats"] / 1e9 / audited if audited else 0.0,
    )


ResultT = TypeVar("ResultT")

_MAX_LONG = 16
"""Calls that cut texts or compile constraints, at once: each holds a thread meanwhile."""
_SHORT = 4096
"""Token ids that are checked without a thread."""

Note = Callable[..., None]
"""Takes facts, by name, for the log line of a request."""


@dataclass(frozen=True, slots=True)
class Summary:
    """An answer that has ended. reason: why. begins, end: what the engine said of the request, and of the answer; what
    the door knows better stands here. before_ns: from the arrival of the call to that of the order at the engine.
    explanation: where it is wanted."""

    reason: Literal["stop", "length", "end_of_sequence", "tool_calls"]
    usage: Usage
    begins: Begins
    end: Ends
    before_ns: int
    explanation: Explanation | None = None


@dataclass(slots=True)
class Said:
    """What is said at once of one of a request's answers.

    usage: with the first one. waiting: while there are no tokens; "" for what is being read. prompt_logprobs: of the
    prompt's tokens but the first. logprobs: one for each token, where they are wanted. calls: parts of calls of tools,
    which are no part of the text. looks: where these tokens, or earlier ones, were looked for. summary: with the
    last one.
    """

    answer: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: Sequence[CallPart] = ()
    looks: list[Looks] = field(default_factory=list)
    usage: Usage | None = None
    waiting: Waits | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    summary: Summary | None = None


class Answering:
    """Answers orders. To be used on one event loop."""

    def __init__(
        self,
        core: Core,
        facts: Facts,
        store: Store,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        sharing: Sharing,
    ) -> None:
        self.core = core
        self.facts = facts
        self.store = store
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self._appointments = Appointments()
        self._working = Bound(_MAX_LONG, "other calls compile constraints or cut long texts", sharing)

    async def answer(
        self, order: Order, call: Asker, note: Note = lambda **facts: None
    ) -> AsyncGenerator[Said, None]:
        """All that is said of an order. note: is told what happened to it.

        Raises what ends the request; TooManyRequestsError says when to try again.
        """
        arrived_ns = time.monotonic_ns()
        if order.context:
            note(context=order.context)
        prompted, calls = await self._prompt(order, call)
        asked = _Asked(self.core, prompted, calls, self.tokenizer, arrived_ns, note)
        try:
            async for said in asked.said():
                yield said
        except TooManyRequestsError as error:
            error.retry_after_s = self._appointments.next_s()
            raise
        finally:
            if asked.has_place:
                self._appointments.place_freed()

    async def long(self, call: Asker, work: Callable[[], ResultT]) -> ResultT:
        """What may take seconds, on a thread of its own. Raises TooManyRequestsError where too many do."""

        async def alone() -> ResultT:
            return await call.run_alone(work)

        return await self._working.run(alone, call.caller.tenant)

    async def _prompt(self, order: Order, call: Asker) -> tuple[Order, CallPlan | None]:
        """The order as the engine gets it, and how tools are called."""
        deadline_ns = None if call.deadline_s is None else int(call.deadline_s * 1e9)
        who = call.caller
        if order.keep is not None:
            who.require("create")
        order = replace(
            order,
            client=call.host,
            caller=who.name,
            tenant=who.tenant,
            admin=who.admin,
            deadline_ns=deadline_ns,
        )
        if call.span is not None:
            traced = Traced(call.span.traceparent, "chat" if order.turns else "text_completion")
            order = replace(order, traced=traced)
        work = partial(self._make_prompt, order, call.check)
        try:
            if order.constraint is not None or order.tools or order.choice.mode != "none":
                return await self.long(call, work)
            if 0 < len(order.prompt) <= _SHORT and not order.tells_logprobs:
                return work()
            return await call.run(work)
        except TooManyRequestsError as error:
            error.retry_after_s = self._appointments.next_s()
            raise

    def _make_prompt(self, order: Order, check: Callable[[], None]) -> tuple[Order, CallPlan | None]:
        identity, tokenizer = self.facts.identity, self.tokenizer
        store = self.store.seen_by(order.viewer)
        check_named_tokens(order, identity)
        stored = None
        if order.context and not 0 < len(order.prompt) <= _SHORT:
            stored = StoredMessages(store, store.manifest(order.context))
            ids = prompt_tokens(order, tokenizer, identity, stored, check)
        elif order.context:
            ids = list(order.prompt)
        else:
            ids = whole_tokens(order, tokenizer, identity, check)
        check_prompt(order, ids, identity)
        tools = order.tools
        if order.choice.mode != "none" and not tools and order.context:
            stored = stored or StoredMessages(store, store.manifest(order.context))
            before = stored.conversation()
            tools = () if before is None else before.conversation.tools
        calls = plan_calls(order.choice, tools, tokenizer, identity.name, order.constraint)
        constraint = order.constraint if calls is None else calls.constraint
        if constraint is not None:
            self.vocabulary.check(constraint)
        if order.tells_logprobs:
            self.vocabulary.token_bytes  # noqa: B018 - made here, since it takes a second
        return (replace(order, text=None, turns=(), tools=(), prompt=ids, constraint=constraint), calls)


class Inbox:
    """Events of one request, for the coroutine that reads them."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._there = asyncio.Event()

    def put(self, events: Sequence[Event]) -> None:
        self._events += events
        self._there.set()

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        self._there.clear()
        return events

    async def wait(self, timeout_s: float | None) -> bool:
        if timeout_s is None:
            await self._there.wait()
            return True
        try:
            # Not `wait_for`, which in Python 3.11 loses a cancellation that comes when the event is set.
            async with asyncio.timeout(timeout_s):
                await self._there.wait()
        except TimeoutError:
            return False
        return True


class _Answer:
    """One answer as its client reads it. count: of its tokens. stopped: whether a stop string was completed."""

    def __init__(self, text: TextStream, calls: CallPlan | None) -> None:
        self.text = text
        self.reader = None if calls is None else calls.reader()
        self.count = 0
        self.stopped = False
        self.looks: list[Looks] = []  # that were not told

    def tell(self, said: Said, text: str) -> None:
        """Adds text, and tells calls in it from what else is said."""
        if self.reader is None:
            said.text += text
        else:
            shown, parts = self.reader.push(text)
            said.text += shown
            said.calls = [*said.calls, *parts]


class _Asked:
    """An order that was given to the engine."""

    def __init__(
        self,
        core: Core,
        order: Order,
        calls: CallPlan | None,
        tokenizer: Tokenizer,
        arrived_ns: int,
        note: Note,
    ) -> None:
        self._order = order
        self._calls = calls
        self._tokenizer = tokenizer
        self._note = note
        self._before_ns = time.monotonic_ns() - arrived_ns
        self._ends = order.stop_token_ids.union(tokenizer.eos_ids)
        self._answers: list[_Answer] = []
        self._begins: Begins | None = None
        self._waits = Waits("")
        self._generated = 0
        self._left = order.answers
        self._inbox = Inbox()
        self._handle: Handle = core.submit(order, self._inbox.put)
        self._told = False  # its usage
        self.has_place = False

    async def said(self) -> AsyncGenerator[Said, None]:
        notices = Notices()
        try:
            while self._left:
                events = self._inbox.take()
                if events:
                    for said in self._read(events):
                        if not self._told:
                            said.usage, self._told = self._usage(), True
                        yield said
                    if isinstance(events[-1], Fails):
                        raise error_of_event(events[-1])
                elif self._generated or self._begins is None:
                    await self._inbox.wait(None)
                elif not await self._inbox.wait(notices.due_in_s()) and notices.take(self._waits):
                    usage, self._told = None if self._told else self._usage(), True
                    yield Said(usage=usage, waiting=self._waits)
        finally:
            self._handle.cancel()

    def _usage(self) -> Usage | None:
        begins = self._begins
        if begins is None:
            return None
        return Usage(begins.cached, begins.prompt, 0, begins.cached, begins.max_tokens)

    def _read(self, events: Sequence[Event]) -> list[Said]:
        """What events that came together say: an answer's tokens before its end."""
        told: list[Said] = []
        by_answer: dict[int, Said] = {}
        ended: list[Said] = []
        for event in events:
            if isinstance(event, Says):
                if not self._answers[event.answer].stopped:
                    self._add(event, by_answer.setdefault(event.answer, Said(event.answer)))
            elif isinstance(event, Ends):
                self._left -= 1
                ended.append(self._end(event))
            elif isinstance(event, Begins):
                self._begin(event)
            elif isinstance(event, Looks):
                self._answers[event.answer].looks.append(event)
            elif isinstance(event, PromptRead):
                told.append(Said(prompt_logprobs=event.logprobs))
            elif isinstance(event, Waits):
                self._waits, self.has_place = event, True
        if by_answer:
            self._note(generated_tokens=self._generated)
        return [*told, *by_answer.values(), *ended]

    def _begin(self, begins: Begins) -> None:
        self._begins, self._told = begins, False
        self._note(
            context=begins.context,
            method=begins.method,
            prompt_tokens=begins.prompt,
            cached_tokens=begins.cached,
            generated_tokens=0,
        )
        order, decode = self._order, self._tokenizer.decode
        if self._calls is not None and self._calls.shown:
            decode = partial(decode, shown=self._calls.shown)
        prompt = order.prompt[len(order.prompt) - begins.prompt :]
        self._answers = [
            _Answer(TextStream(decode, prompt, order.stops, order.sampling.min_tokens), self._calls)
            for _ in range(order.answers)
        ]

    def _add(self, says: Says, said: Said) -> None:
        """Adds tokens up to the one that completes a stop string, which ends the answer."""
        answer = self._answers[says.answer]
        said.looks += answer.looks
        answer.looks = []
        for number, token_id in enumerate(says.token_ids):
            answer.count += 1
            self._generated += 1
            said.token_ids.append(token_id)
            said.logprobs += says.logprobs[number : number + 1]
            if token_id in self._ends:
                continue
            text, answer.stopped = answer.text.push(token_id)
            answer.tell(said, text)
            if answer.stopped:
                break
        if answer.stopped or says.last:
            self._handle.stop(says.answer, answer.count)

    def _end(self, end: Ends) -> Said:
        answer, begins, usage = self._answers[end.answer], self._begins, self._usage()
        if begins is None or usage is None:
            raise RuntimeError("an answer ended that had not begun")
        reason: Literal["stop", "length", "end_of_sequence", "tool_calls"] = end.reason
        completion = end.completion_tokens
        if answer.stopped:
            reason, completion = "stop", answer.count
        said = Said(end.answer)
        answer.tell(said, answer.text.flush())
        if answer.reader is not None:
            said.text += answer.reader.flush()
            if answer.reader.finished and reason != "length":
                reason = "tool_calls"
        usage = dataclasses.replace(
            usage,
            completion_tokens=completion,
            drafted_tokens=end.figures.get("drafted", 0),
            accepted_tokens=end.figures.get("accepted", 0),
            cache_write_tokens=end.written,
        )
        if end.kept:
            self._note(kept=end.kept)
        why = explanation(self._order, begins, end, self._before_ns)
        asked = why if self._order.explain else None
        said.summary = Summary(reason, usage, begins, end, self._before_ns, asked)
        self._note(
            **asdict(why),
            first_token_ms=(self._before_ns + end.times.first_token_ns) / 1e6,
            total_ms=(self._before_ns + end.times.total_ns) / 1e6,
        )
        return said
