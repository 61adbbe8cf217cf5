"""Answers as OpenAI's endpoints reply, as a whole and in pieces: one class per endpoint, the same steps for all."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET, Struct, UnsetType, structs

from decode_engine.gateway.wire import reply_structs as replies
from decode_engine.gateway.wire.bodies import Asked
from decode_engine.gateway.wire.messages_shape import tool_objects
from decode_engine.gateway.wire.parameters import pick
from decode_engine.layers.figures import Figures as Counted
from decode_engine.orders.events import Looks, TokenLogprob
from decode_engine.rpc.answers.answering import Said, Summary
from index_store.models.conversation.call_syntax import CallPart
from index_store.models.conversation.messages import ToolCall
from sparsekv.v1.values import LayersLooked, Look

DONE = "[DONE]"
_LOWEST = -9999.0
"""Of a token that cannot come: JSON has no infinity."""


BytesOf = Callable[[int], bytes]
"""What a token stands for, which may be a part of a character."""


@dataclass(slots=True)
class Answered:
    """One of the answers to a request. texts: its parts. logprobs: of its tokens, where they are wanted. calls: that it
    makes. looks: where its tokens were looked for, where that is wanted."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    looks: list[Looks] = field(default_factory=list)

    def add(self, said: Said) -> None:
        self.texts.append(said.text)
        self.logprobs += said.logprobs
        self.looks += said.looks
        for part in said.calls:
            if part.index == len(self.calls):
                self.calls.append(ToolCall(part.name, "", part.id))
            before = self.calls[part.index]
            self.calls[part.index] = replace(before, arguments=before.arguments + part.arguments)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Shape(ABC):
    """Makes the messages of one reply: the whole of it, or events as they are sent, perhaps none."""

    prefix: str
    """Of the reply's id."""

    def __init__(self, asked: Asked, bytes_of: BytesOf, unsaid: Collection[int] = ()) -> None:
        """unsaid: tokens whose bytes are a name, and no part of the text."""
        self.asked = asked
        self.bytes_of = bytes_of
        self.unsaid = unsaid
        self.created = int(time.time())
        self.id = self.prefix + secrets.token_hex(16)

    @abstractmethod
    def whole(self, answers: Sequence[Answered], summaries: Sequence[Summary]) -> Struct | dict[str, Any]:
        """The reply at once. summaries: of all answers."""

    @abstractmethod
    def begin(self) -> bytes:
        """Events before the first text."""

    @abstractmethod
    def piece(self, said: Said) -> bytes:
        """Events of a piece of an answer."""

    @abstractmethod
    def end(self, summaries: Sequence[Summary]) -> bytes:
        """Events after the last text. summaries: of all answers."""

    @abstractmethod
    def fail(self, error: replies.ErrorReply) -> bytes:
        """Events of an answer that breaks off."""


class _Choices(Shape):
    reply: type[replies.ChatReply] | type[replies.CompletionReply]
    chunk: type[replies.ChatChunk] | type[replies.CompletionChunk]
    kinds: tuple[str, str]
    """What whole replies and chunks call themselves."""

    def whole(self, answers: Sequence[Answered], summaries: Sequence[Summary]) -> Struct:
        choices = [
            self._whole(index, answer, finish_reason(summary))
            for index, (answer, summary) in enumerate(zip(answers, summaries, strict=True))
        ]
        return self.reply(
            self.id,
            self.kinds[0],
            self.created,
            self.asked.model,
            choices,
            usage(summaries, self.asked.order.answers),
            figures_of(summaries[0]),
            looks_of(answers[0].looks),
        )

    def begin(self) -> bytes:
        return b""

    def piece(self, said: Said) -> bytes:
        if not (said.text or said.logprobs or said.calls or said.looks):
            return b""
        return self._chunk([self._choice(said, None)], looks=said.looks)

    def end(self, summaries: Sequence[Summary]) -> bytes:
        events = []
        for index, summary in enumerate(summaries):
            ending = self._choice(Said(index), finish_reason(summary))
            events.append(
                self._chunk([ending], told=summary if summary.end.kept or summary.explanation else None)
            )
        if self.asked.include_usage:
            events.append(self._chunk([], usage(summaries, self.asked.order.answers), summaries[0]))
        return b"".join([*events, replies.event(DONE)])

    def fail(self, error: replies.ErrorReply) -> bytes:
        return replies.event(error) + replies.event(DONE)

    @abstractmethod
    def _whole(self, index: int, answer: Answered, finished: replies.FinishReason) -> Any:
        """One choice of a whole reply."""

    @abstractmethod
    def _choice(self, said: Said, finished: replies.FinishReason | None) -> Any:
        """The one choice of a chunk."""

    def _chunk(
        self,
        choices: list[Any],
        used: replies.Usage | None = None,
        told: Summary | None = None,
        looks: Sequence[Looks] = (),
    ) -> bytes:
        return replies.event(
            self.chunk(
                self.id,
                self.kinds[1],
                self.created,
                self.asked.model,
                choices,
                used if self.asked.include_usage else UNSET,
                UNSET if told is None else figures_of(told),
                looks_of(looks),
            )
        )


class ChatShape(_Choices):
    """Chat completions."""

    prefix = "chatcmpl-"
    reply, chunk = replies.ChatReply, replies.ChatChunk
    kinds = ("chat.completion", "chat.completion.chunk")

    def begin(self) -> bytes:
        delta = replies.ChatDelta(role="assistant", content="", refusal=None)
        choices = (
            replies.ChatChunkChoice(index, delta, None, None) for index in range(self.asked.order.answers)
        )
        return b"".join(self._chunk([choice]) for choice in choices)

    def _whole(self, index: int, answer: Answered, finished: replies.FinishReason) -> replies.ChatChoice:
        message = replies.ChatMessage("assistant", answer.text)
        if answer.calls:
            calls = [*map(_whole_call, answer.calls)]
            message = replies.ChatMessage("assistant", answer.text or None, tool_calls=calls)
        return replies.ChatChoice(index, message, chat_logprobs(answer.logprobs, self.bytes_of), finished)

    def _choice(self, said: Said, finished: replies.FinishReason | None) -> replies.ChatChunkChoice:
        calls = [_call_delta(part) for part in said.calls] if said.calls else UNSET
        text = said.text if said.text or not (said.calls or finished) else UNSET
        delta = replies.ChatDelta(tool_calls=calls, content=text)
        return replies.ChatChunkChoice(
            said.answer, delta, chat_logprobs(said.logprobs, self.bytes_of), finished
        )


class CompletionShape(_Choices):
    """Completions."""

    prefix = "cmpl-"
    reply, chunk = replies.CompletionReply, replies.CompletionChunk
    kinds = ("text_completion", "text_completion")

    def __init__(self, asked: Asked, bytes_of: BytesOf, unsaid: Collection[int] = ()) -> None:
        super().__init__(asked, bytes_of, unsaid)
        self._offsets: dict[int, int] = {}

    def _whole(
        self, index: int, answer: Answered, finished: replies.FinishReason
    ) -> replies.CompletionChoice:
        return self._choice(Said(index, text=answer.text, logprobs=answer.logprobs), finished)

    def _choice(self, said: Said, finished: replies.FinishReason | None) -> replies.CompletionChoice:
        before = self._offsets.get(said.answer, 0)
        told = completion_logprobs(said.logprobs, before, self.bytes_of, self.unsaid)
        self._offsets[said.answer] = before + len(said.text)
        return replies.CompletionChoice(said.answer, said.text, told, finished)


def finish_reason(summary: Summary) -> replies.FinishReason:
    """Why an answer ended, in OpenAI's words."""
    return "stop" if summary.reason == "end_of_sequence" else summary.reason


def usage(summaries: Sequence[Summary], each: int) -> replies.Usage:
    """Tokens of all answers. each: to how many the prompt is the same."""
    prompts = [summary.usage for summary in summaries[::each]]
    cached = sum(used.cached_tokens for used in prompts)
    prompt = cached + sum(used.prompt_tokens for used in prompts)
    generated = sum(summary.usage.completion_tokens for summary in summaries)
    drafted = sum(summary.usage.drafted_tokens for summary in summaries)
    accepted = sum(summary.usage.accepted_tokens for summary in summaries)
    details = replies.CompletionDetails(accepted, drafted - accepted) if drafted else UNSET
    written = sum(summary.usage.cache_write_tokens for summary in summaries) or UNSET
    return replies.Usage(
        prompt, generated, prompt + generated, replies.PromptDetails(cached, written), details
    )


def figures_of(summary: Summary) -> replies.Figures:
    begins, end = summary.begins, summary.end
    return replies.Figures(
        method=begins.method,
        method_reason=begins.reason,
        budget=begins.budget,
        remainder=begins.remainder,
        seed=end.seed,
        fraction_of_keys=Counted(**end.figures).fraction,
        first_token_ms=(summary.before_ns + end.times.first_token_ns) / 1e6,
        total_ms=(summary.before_ns + end.times.total_ns) / 1e6,
        cached_context=begins.context or None,
        context=end.kept or None,
        explanation=summary.explanation or UNSET,
    )


def looks_of(looks: Sequence[Looks]) -> list[Look] | UnsetType:
    """Where tokens were looked for; nothing where that is not told."""
    if not looks:
        return UNSET
    return [
        Look(each.token, tuple(LayersLooked(*structs.astuple(one)) for one in each.layers)) for each in looks
    ]


def chat_logprobs(tokens: Sequence[TokenLogprob], bytes_of: BytesOf) -> replies.ChatLogprobs | None:
    """Of chat completions; None where there are none."""
    if not tokens:
        return None
    return replies.ChatLogprobs(
        [
            replies.TokenChosen(
                *_told(bytes_of(token.token_id), token.logprob),
                [
                    replies.TokenTold(*_told(bytes_of(other), logprob))
                    for other, logprob in token.alternatives
                ],
            )
            for token in tokens
        ]
    )


def completion_logprobs(
    tokens: Sequence[TokenLogprob], offset: int, bytes_of: BytesOf, unsaid: Collection[int]
) -> replies.CompletionLogprobs | None:
    """Of completions; None where there are none. offset: of the first token, in characters of the answer."""
    if not tokens:
        return None
    offsets, decoded = [], b""
    for token in tokens:
        offsets.append(offset + len(decoded.decode("utf-8", "replace")))
        decoded += b"" if token.token_id in unsaid else bytes_of(token.token_id)
    return replies.CompletionLogprobs(
        [_text(bytes_of(token.token_id)) for token in tokens],
        [_finite(token.logprob) for token in tokens],
        [
            {_text(bytes_of(other)): _finite(logprob) for other, logprob in token.alternatives}
            for token in tokens
        ],
        offsets,
    )


def _whole_call(call: ToolCall) -> replies.Call:
    return replies.Call(call.id, "function", replies.WholeFunction(call.name, call.arguments))


def _call_delta(part: CallPart) -> replies.CallDelta:
    if not part.id:
        return replies.CallDelta(part.index, replies.CalledFunction(part.arguments))
    return replies.CallDelta(
        part.index, replies.CalledFunction(part.arguments, part.name), part.id, "function"
    )


def _told(token: bytes, logprob: float) -> tuple[str, float, list[int]]:
    return _text(token), _finite(logprob), list(token)


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


class ResponseShape(Shape):
    """Responses. An answer is one message, calls of functions, or a message and then calls; the last item is open."""

    prefix = "resp_"

    def __init__(self, asked: Asked, bytes_of: BytesOf, unsaid: Collection[int] = ()) -> None:
        super().__init__(asked, bytes_of, unsaid)
        self._number = 0
        self._items: list[replies.MessageItem | replies.CallItem] = []
        self._parts: list[str] = []
        """Text or arguments of the open item."""

    def whole(self, answers: Sequence[Answered], summaries: Sequence[Summary]) -> replies.ResponseReply:
        (answer,), (summary,) = answers, summaries
        if answer.text or not answer.calls:
            self._items.append(_message(answer.text))
        self._items += [_call(call.id, call.name, call.arguments) for call in answer.calls]
        status = _status(summary)
        for item in self._items:
            item.status = "completed" if item is not self._items[-1] else status
        return self._ended(summary)

    def begin(self) -> bytes:
        begun = self._response("in_progress")
        created = self._event("response.created", response=begun)
        return created + self._event("response.in_progress", response=begun)

    def piece(self, said: Said) -> bytes:
        events = b""
        if said.text:
            if not (self._items and isinstance(self._items[-1], replies.MessageItem)):
                events += self._open(_message(None))
            self._parts.append(said.text)
            kind, place = "response.output_text.delta", len(self._items) - 1
            delta = replies.TextDelta(kind, self._next(), self._items[-1].id, place, 0, said.text)
            events += replies.event(delta, kind)
        return events + b"".join(map(self._call_part, said.calls))

    def _call_part(self, part: CallPart) -> bytes:
        events = self._open(_call(part.id, part.name, "")) if part.id else b""
        if part.arguments:
            self._parts.append(part.arguments)
            events += self._event(
                "response.function_call_arguments.delta", **self._item_place(), delta=part.arguments
            )
        return events

    def end(self, summaries: Sequence[Summary]) -> bytes:
        opened = b"" if self._items else self._open(_message(None))
        status = _status(summaries[0])
        closed = self._close(status)
        return opened + closed + self._event(f"response.{status}", response=self._ended(summaries[0]))

    def fail(self, error: replies.ErrorReply) -> bytes:
        told = error.error
        return self._event("error", code=told.code, message=told.message, param=told.param)

    def _open(self, item: replies.MessageItem | replies.CallItem) -> bytes:
        events = self._close("completed") if self._items else b""
        self._items.append(item)
        events += self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if isinstance(item, replies.MessageItem):
            events += self._event(
                "response.content_part.added", **self._place(), part=replies.OutputText(text="")
            )
        return events

    def _close(self, status: replies.ItemStatus) -> bytes:
        item, text = self._items[-1], "".join(self._parts)
        self._parts.clear()
        item.status = status
        if isinstance(item, replies.MessageItem):
            item.content = [replies.OutputText(text=text)]
            events = self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
            events += self._event(
                "response.content_part.done", **self._place(), part=replies.OutputText(text=text)
            )
        else:
            item.arguments = text
            events = self._event(
                "response.function_call_arguments.done", **self._item_place(), name=item.name, arguments=text
            )
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}

    def _place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number

    def _event(self, kind: str, **fields: Any) -> bytes:
        return replies.event({"type": kind, "sequence_number": self._next(), **fields}, kind)

    def _ended(self, summary: Summary) -> replies.ResponseReply:
        response = self._response(_status(summary))
        cut = response.status == "incomplete"
        response.completed_at = None if cut else int(time.time())
        response.incomplete_details = replies.Incomplete() if cut else None
        response.usage, response.sparsekv = response_usage(summary), figures_of(summary)
        return response

    def _response(self, status: replies.ItemStatus) -> replies.ResponseReply:
        given = self.asked.given
        tools = tool_objects(self.asked.order.tools)
        told: dict[str, Any] = {
            "tool_choice": "auto" if tools else "none",
            "parallel_tool_calls": bool(tools),
            **pick(given, _ECHOED),
        }
        return replies.ResponseReply(
            id=self.id,
            created_at=self.created,
            status=status,
            instructions=given.get("instructions"),
            model=self.asked.model,
            output=self._items,
            tools=tools,
            text={"format": {"type": "text"}, **given.get("text", {})},
            **told,
        )


_ECHOED = ("temperature", "top_p", "max_output_tokens", "tool_choice", "parallel_tool_calls")


def _status(summary: Summary) -> replies.ItemStatus:
    return "incomplete" if summary.reason == "length" else "completed"


def _message(text: str | None) -> replies.MessageItem:
    return replies.MessageItem(
        id="msg_" + secrets.token_hex(16), content=[] if text is None else [replies.OutputText(text=text)]
    )


def _call(id_: str, name: str, arguments: str) -> replies.CallItem:
    return replies.CallItem(id="fc_" + secrets.token_hex(16), call_id=id_, name=name, arguments=arguments)


def response_usage(summary: Summary) -> replies.ResponseUsage:
    """`usage` under the names of responses."""
    usage = summary.usage
    prompt, generated = usage.cached_tokens + usage.prompt_tokens, usage.completion_tokens
    details = replies.InputDetails(usage.cached_tokens, usage.cache_write_tokens), replies.OutputDetails()
    return replies.ResponseUsage(prompt, details[0], generated, details[1], prompt + generated)
