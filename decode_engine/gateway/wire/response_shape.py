"""What /v1/responses replies: messages and calls of functions as items, whole or in numbered events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from decode_engine.gateway.wire.bodies import Asked
from decode_engine.gateway.wire.parameters import pick
from decode_engine.gateway.wire.reply_structs import (
    CallItem,
    ErrorReply,
    Incomplete,
    InputDetails,
    ItemStatus,
    MessageItem,
    OutputDetails,
    OutputText,
    ResponseReply,
    ResponseUsage,
    TextDelta,
)
from decode_engine.gateway.wire.response_items import tool_objects
from decode_engine.gateway.wire.sent_events import event
from decode_engine.gateway.wire.shapes import Answered, BytesOf, Shape, figures_of
from decode_engine.rpc.answers.answering import Said, Summary
from index_store.models.conversation.call_syntax import CallPart


class ResponseShape(Shape):
    """Responses. An answer is one message, calls of functions, or a message and then calls; the last item is open."""

    prefix = "resp_"

    def __init__(self, asked: Asked, bytes_of: BytesOf) -> None:
        super().__init__(asked, bytes_of)
        self._number = 0
        self._items: list[MessageItem | CallItem] = []
        self._parts: list[str] = []
        """Text or arguments of the open item."""

    def whole(self, answers: Sequence[Answered], summaries: Sequence[Summary]) -> ResponseReply:
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
            if not (self._items and isinstance(self._items[-1], MessageItem)):
                events += self._open(_message(None))
            self._parts.append(said.text)
            kind, place = "response.output_text.delta", len(self._items) - 1
            delta = TextDelta(kind, self._next(), self._items[-1].id, place, 0, said.text)
            events += event(delta, kind)
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

    def fail(self, error: ErrorReply) -> bytes:
        told = error.error
        return self._event("error", code=told.code, message=told.message, param=told.param)

    def _open(self, item: MessageItem | CallItem) -> bytes:
        """Begins an item, and ends the one before."""
        events = self._close("completed") if self._items else b""
        self._items.append(item)
        events += self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if isinstance(item, MessageItem):
            events += self._event("response.content_part.added", **self._place(), part=OutputText(text=""))
        return events

    def _close(self, status: ItemStatus) -> bytes:
        item, text = self._items[-1], "".join(self._parts)
        self._parts.clear()
        item.status = status
        if isinstance(item, MessageItem):
            item.content = [OutputText(text=text)]
            events = self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
            events += self._event("response.content_part.done", **self._place(), part=OutputText(text=text))
        else:
            item.arguments = text
            events = self._event(
                "response.function_call_arguments.done",
                **self._item_place(),
                name=item.name,
                arguments=text,
            )
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}

    def _place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}

    def _next(self) -> int:
        """The number of the next event."""
        number, self._number = self._number, self._number + 1
        return number

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "sequence_number": self._next(), **fields}, kind)

    def _ended(self, summary: Summary) -> ResponseReply:
        response = self._response(_status(summary))
        cut = response.status == "incomplete"
        response.completed_at = None if cut else int(time.time())
        response.incomplete_details = Incomplete() if cut else None
        response.usage, response.sparsekv = response_usage(summary), figures_of(summary)
        return response

    def _response(self, status: ItemStatus) -> ResponseReply:
        given = self.asked.given
        tools = tool_objects(self.asked.order.tools)
        told: dict[str, Any] = {
            "tool_choice": "auto" if tools else "none",
            "parallel_tool_calls": bool(tools),
            **pick(given, _ECHOED),
        }
        return ResponseReply(
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


def _status(summary: Summary) -> ItemStatus:
    return "incomplete" if summary.reason == "length" else "completed"


def _message(text: str | None) -> MessageItem:
    """A message of a text; None for one that is open."""
    return MessageItem(
        id="msg_" + secrets.token_hex(16), content=[] if text is None else [OutputText(text=text)]
    )


def _call(id_: str, name: str, arguments: str) -> CallItem:
    return CallItem(id="fc_" + secrets.token_hex(16), call_id=id_, name=name, arguments=arguments)


def response_usage(summary: Summary) -> ResponseUsage:
    """`usage` under the names of responses."""
    usage = summary.usage
    prompt = usage.cached + usage.prompt
    details = InputDetails(usage.cached), OutputDetails()
    return ResponseUsage(prompt, details[0], usage.completion, details[1], prompt + usage.completion)
