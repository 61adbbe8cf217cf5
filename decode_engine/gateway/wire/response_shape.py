"""What /v1/responses replies: messages and calls of functions as items, whole or in numbered events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from decode_engine.gateway.wire.bodies import Order
from decode_engine.gateway.wire.events import event
from decode_engine.gateway.wire.parameters import pick
from decode_engine.gateway.wire.response_items import tool_objects
from decode_engine.gateway.wire.shapes import Answered, Shape, figures_of
from decode_engine.rpc.client import Piece, Summary, ToolCallPart

_MESSAGE = "message"


class ResponseShape(Shape):
    """Responses. An answer is one message, calls of functions, or a message and then calls; the last item is open."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._parts: list[str] = []
        """Text or arguments of the open item."""

    def _prefix(self) -> str:
        return "resp_"

    def whole(self, answers: Sequence[Answered]) -> dict[str, Any]:
        (answer,) = answers
        if answer.text or not answer.calls:
            self._items.append(_message(answer.text))
        self._items += [_call(call.id, call.name, call.arguments) for call in answer.calls]
        status = _status(answer.summary)
        for item in self._items:
            item["status"] = "completed" if item is not self._items[-1] else status
        return self._ended(answer.summary)

    def begin(self) -> Iterator[str]:
        begun = self._response("in_progress")
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def piece(self, piece: Piece) -> Iterator[str]:
        if piece.text:
            if not (self._items and self._items[-1]["type"] == _MESSAGE):
                yield from self._open(_message(None))
            self._parts.append(piece.text)
            yield self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=[])
        for part in piece.tool_calls:
            yield from self._call_part(part)

    def _call_part(self, part: ToolCallPart) -> Iterator[str]:
        if part.id:
            yield from self._open(_call(part.id, part.name, ""))
        if part.arguments_json:
            self._parts.append(part.arguments_json)
            yield self._event(
                "response.function_call_arguments.delta", **self._item_place(), delta=part.arguments_json
            )

    def end(self, summaries: Sequence[Summary]) -> Iterator[str]:
        if not self._items:
            yield from self._open(_message(None))
        status = _status(summaries[0])
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self._ended(summaries[0]))

    def fail(self, error: dict[str, Any]) -> Iterator[str]:
        told = error["error"]
        yield self._event("error", code=told["code"], message=told["message"], param=told["param"])

    def _open(self, item: dict[str, Any]) -> Iterator[str]:
        """Begins an item, and ends the one before."""
        if self._items:
            yield from self._close("completed")
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if item["type"] == _MESSAGE:
            yield self._event("response.content_part.added", **self._place(), part=_part(""))

    def _close(self, status: str) -> Iterator[str]:
        item, text = self._items[-1], "".join(self._parts)
        self._parts.clear()
        item["status"] = status
        if item["type"] == _MESSAGE:
            item["content"] = [_part(text)]
            yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
            yield self._event("response.content_part.done", **self._place(), part=_part(text))
        else:
            item["arguments"] = text
            yield self._event(
                "response.function_call_arguments.done",
                **self._item_place(),
                name=item["name"],
                arguments=text,
            )
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _ended(self, summary: Summary) -> dict[str, Any]:
        status = _status(summary)
        cut = status == "incomplete"
        return {
            **self._response(status),
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": response_usage(summary),
            "sparsekv": figures_of(summary),
        }

    def _response(self, status: str) -> dict[str, Any]:
        given = self.order.given
        tools = tool_objects(self.order.options.get("tools") or ())
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": given.get("instructions"),
            "model": self.order.model,
            "output": self._items,
            "tools": tools,
            "tool_choice": "auto" if tools else "none",
            "parallel_tool_calls": bool(tools),
            "store": False,
            "truncation": "disabled",
            "metadata": {},
            "temperature": 1.0,
            "top_p": 1.0,
            "max_output_tokens": None,
            **pick(given, _ECHOED),
            "text": {"format": {"type": "text"}, **given.get("text", {})},
        }


_ECHOED = ("temperature", "top_p", "max_output_tokens", "tool_choice", "parallel_tool_calls")


def _status(summary: Summary) -> str:
    return "incomplete" if summary.finish_reason == "length" else "completed"


def _message(text: str | None) -> dict[str, Any]:
    """A message of a text; None for one that is open."""
    return {
        "id": "msg_" + secrets.token_hex(16),
        "type": _MESSAGE,
        "role": "assistant",
        "status": "in_progress",
        "content": [] if text is None else [_part(text)],
    }


def _call(id_: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": "fc_" + secrets.token_hex(16),
        "type": "function_call",
        "call_id": id_,
        "name": name,
        "arguments": arguments,
        "status": "in_progress",
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def response_usage(summary: Summary) -> dict[str, Any]:
    """`usage` under the names of responses."""
    prompt = summary.context_tokens + summary.prompt_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": summary.context_tokens, "cache_write_tokens": 0},
        "output_tokens": summary.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + summary.completion_tokens,
    }
