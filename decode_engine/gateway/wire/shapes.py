"""What OpenAI's endpoints reply, as a whole and in pieces: one class per endpoint, the same steps for all."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from decode_engine.gateway.wire.bodies import Order
from decode_engine.gateway.wire.events import event
from decode_engine.gateway.wire.tool_shapes import call_deltas, whole_calls
from decode_engine.rpc.client import Piece, Summary, TokenLogprob
from index_store.models.conversation.messages import ToolCall

DONE = "[DONE]"
_LOWEST = -9999.0
"""Of a token that cannot come: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One of the answers to a request. logprobs: of its tokens, where they are wanted. calls: that it makes."""

    text: str
    logprobs: tuple[TokenLogprob, ...]
    summary: Summary
    calls: tuple[ToolCall, ...] = ()


class Shape(ABC):
    """Makes the messages of one reply."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.created = int(time.time())
        self.id = self._prefix() + secrets.token_hex(16)

    @abstractmethod
    def _prefix(self) -> str:
        """Of the reply's id."""

    @abstractmethod
    def whole(self, answers: Sequence[Answered]) -> dict[str, Any]:
        """The reply at once."""

    @abstractmethod
    def begin(self) -> Iterator[str]:
        """Events before the first text."""

    @abstractmethod
    def piece(self, piece: Piece) -> Iterator[str]:
        """Events of a piece of an answer."""

    @abstractmethod
    def end(self, summaries: Sequence[Summary]) -> Iterator[str]:
        """Events after the last text. summaries: of all answers."""

    @abstractmethod
    def fail(self, error: dict[str, Any]) -> Iterator[str]:
        """Events of an answer that breaks off. error: in OpenAI's shape."""


class _Choices(Shape):
    """Chat completions and completions: chunks with choices."""

    kind: str
    chunk_kind: str

    def begin(self) -> Iterator[str]:
        return iter(())

    def whole(self, answers: Sequence[Answered]) -> dict[str, Any]:
        summaries = [answer.summary for answer in answers]
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        figures = {"usage": usage(summaries), "sparsekv": figures_of(summaries[0])}
        return {**self._head(self.kind), "choices": choices, **figures}

    def piece(self, piece: Piece) -> Iterator[str]:
        if piece.text or piece.logprobs or piece.tool_calls:
            yield self._chunk([self._choice(piece, None)])

    def end(self, summaries: Sequence[Summary]) -> Iterator[str]:
        for index, summary in enumerate(summaries):
            ending = self._choice(Piece((), "", index), finish_reason(summary))
            yield self._chunk([ending], kept=summary if summary.kept_context else None)
        if self.order.include_usage:
            yield self._chunk([], summaries)
        yield event(DONE)

    def fail(self, error: dict[str, Any]) -> Iterator[str]:
        yield event(error)
        yield event(DONE)

    @abstractmethod
    def _whole_choice(self, index: int, answer: Answered) -> dict[str, Any]:
        """One of the choices of a whole reply."""

    @abstractmethod
    def _choice(self, piece: Piece, finished: str | None) -> dict[str, Any]:
        """The one choice of a chunk."""

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.order.model}

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        summaries: Sequence[Summary] = (),
        kept: Summary | None = None,
    ) -> str:
        chunk: dict[str, Any] = {**self._head(self.chunk_kind), "choices": choices}
        if self.order.include_usage:
            chunk["usage"] = usage(summaries) if summaries else None
        told = kept or next(iter(summaries), None)
        if told is not None:
            chunk["sparsekv"] = figures_of(told)
        return event(chunk)


class ChatShape(_Choices):
    """Chat completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _prefix(self) -> str:
        return "chatcmpl-"

    def begin(self) -> Iterator[str]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        for index in range(self.order.options.get("n") or 1):
            yield self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _whole_choice(self, index: int, answer: Answered) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": whole_calls(answer.calls)}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(answer.logprobs),
            "finish_reason": finish_reason(answer.summary),
        }

    def _choice(self, piece: Piece, finished: str | None) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.tool_calls:
            delta["tool_calls"] = call_deltas(piece.tool_calls)
        if piece.text or not (piece.tool_calls or finished):
            delta["content"] = piece.text
        told = chat_logprobs(piece.logprobs)
        return {"index": piece.index, "delta": delta, "logprobs": told, "finish_reason": finished}


class CompletionShape(_Choices):
    """Completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._offsets: dict[int, int] = {}

    def _prefix(self) -> str:
        return "cmpl-"

    def _whole_choice(self, index: int, answer: Answered) -> dict[str, Any]:
        piece = Piece((), answer.text, index, answer.logprobs)
        return self._choice(piece, finish_reason(answer.summary))

    def _choice(self, piece: Piece, finished: str | None) -> dict[str, Any]:
        told = completion_logprobs(piece.logprobs, self._offsets.get(piece.index, 0))
        self._offsets[piece.index] = self._offsets.get(piece.index, 0) + len(piece.text)
        return {"index": piece.index, "text": piece.text, "logprobs": told, "finish_reason": finished}


def finish_reason(summary: Summary) -> str:
    """Why an answer ended, in OpenAI's words."""
    return summary.finish_reason if summary.finish_reason in ("length", "tool_calls") else "stop"


def usage(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Tokens of all answers. Those of the context count as part of the prompt that was not computed."""
    prompt = summaries[0].context_tokens + summaries[0].prompt_tokens
    generated = sum(summary.completion_tokens for summary in summaries)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": summaries[0].context_tokens},
    }


def figures_of(summary: Summary) -> dict[str, Any]:
    """What OpenAI's replies have no place for: how the answer was made, and the fraction of keys that was touched."""
    return {
        "method": summary.method,
        "method_reason": summary.method_reason,
        "budget": summary.budget,
        "remainder": summary.remainder,
        "seed": summary.seed,
        "fraction_of_keys": summary.selection.fraction_all,
        "first_token_ms": summary.timings.first_token_ns / 1e6,
        "total_ms": summary.timings.total_ns / 1e6,
        "cached_context": summary.context.removeprefix("contexts/") or None,
        "context": summary.kept_context.removeprefix("contexts/") or None,
    }


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """Of chat completions; None where there are none."""
    if not tokens:
        return None
    content = [
        {**_told(token), "top_logprobs": [_told(alternative) for alternative in token.alternatives]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
    """Of completions; None where there are none. offset: of the first token, in characters of the answer."""
    if not tokens:
        return None
    offsets, decoded = [], b""
    for token in tokens:
        offsets.append(offset + len(decoded.decode("utf-8", "replace")))
        decoded += token.text
    return {
        "tokens": [_text(token) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {_text(alternative): _finite(alternative.logprob) for alternative in token.alternatives}
            for token in tokens
        ],
        "text_offset": offsets,
    }


def _told(token: Any) -> dict[str, Any]:
    return {"token": _text(token), "logprob": _finite(token.logprob), "bytes": list(token.text)}


def _text(token: Any) -> str:
    return bytes(token.text).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
