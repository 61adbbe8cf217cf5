"""Answers as OpenAI's endpoints reply, as a whole and in pieces: one class per endpoint, the same steps for all."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, Struct

from decode_engine.gateway.wire.bodies import Asked
from decode_engine.gateway.wire.reply_structs import (
    Call,
    CallDelta,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionReply,
    ErrorReply,
    Figures,
    FinishReason,
    PromptDetails,
    TokenChosen,
    TokenTold,
    Usage,
    WholeFunction,
)
from decode_engine.gateway.wire.sent_events import event
from decode_engine.rpc.client import Piece, Summary, TokenLogprob, ToolCallPart
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
    """Makes the messages of one reply: the whole of it, or events as they are sent, perhaps none."""

    prefix: str
    """Of the reply's id."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.created = int(time.time())
        self.id = self.prefix + secrets.token_hex(16)

    @abstractmethod
    def whole(self, answers: Sequence[Answered]) -> Struct | dict[str, Any]:
        """The reply at once."""

    @abstractmethod
    def begin(self) -> bytes:
        """Events before the first text."""

    @abstractmethod
    def piece(self, piece: Piece) -> bytes:
        """Events of a piece of an answer."""

    @abstractmethod
    def end(self, summaries: Sequence[Summary]) -> bytes:
        """Events after the last text. summaries: of all answers."""

    @abstractmethod
    def fail(self, error: ErrorReply) -> bytes:
        """Events of an answer that breaks off."""


class _Choices(Shape):
    """Chat completions and completions: chunks with choices."""

    chunk: type[ChatChunk] | type[CompletionChunk]
    kind: str

    def begin(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        if not (piece.text or piece.logprobs or piece.tool_calls):
            return b""
        return self._chunk([self._choice(piece, None)])

    def end(self, summaries: Sequence[Summary]) -> bytes:
        events = []
        for index, summary in enumerate(summaries):
            ending = self._choice(Piece((), "", index), finish_reason(summary))
            events.append(self._chunk([ending], told=summary if summary.kept_context else None))
        if self.asked.include_usage:
            events.append(self._chunk([], usage(summaries), summaries[0]))
        return b"".join([*events, event(DONE)])

    def fail(self, error: ErrorReply) -> bytes:
        return event(error) + event(DONE)

    @abstractmethod
    def _choice(self, piece: Piece, finished: FinishReason | None) -> Any:
        """The one choice of a chunk."""

    def _chunk(self, choices: list[Any], used: Usage | None = None, told: Summary | None = None) -> bytes:
        return event(
            self.chunk(
                self.id,
                self.kind,
                self.created,
                self.asked.model,
                choices,
                used if self.asked.include_usage else UNSET,
                UNSET if told is None else figures_of(told),
            )
        )


class ChatShape(_Choices):
    """Chat completions."""

    prefix = "chatcmpl-"
    chunk = ChatChunk
    kind = "chat.completion.chunk"

    def begin(self) -> bytes:
        delta = ChatDelta(role="assistant", content="", refusal=None)
        choices = (ChatChunkChoice(index, delta, None, None) for index in range(self.asked.order.answers))
        return b"".join(self._chunk([choice]) for choice in choices)

    def whole(self, answers: Sequence[Answered]) -> ChatReply:
        choices = []
        for index, answer in enumerate(answers):
            message = ChatMessage("assistant", answer.text)
            if answer.calls:
                message = ChatMessage(
                    "assistant", answer.text or None, tool_calls=list(map(_call, answer.calls))
                )
            told = chat_logprobs(answer.logprobs)
            choices.append(ChatChoice(index, message, told, finish_reason(answer.summary)))
        summaries = [answer.summary for answer in answers]
        return ChatReply(
            self.id,
            "chat.completion",
            self.created,
            self.asked.model,
            choices,
            usage(summaries),
            figures_of(summaries[0]),
        )

    def _choice(self, piece: Piece, finished: FinishReason | None) -> ChatChunkChoice:
        calls = [_call_delta(part) for part in piece.tool_calls] if piece.tool_calls else UNSET
        said = piece.text if piece.text or not (piece.tool_calls or finished) else UNSET
        delta = ChatDelta(tool_calls=calls, content=said)
        return ChatChunkChoice(piece.index, delta, chat_logprobs(piece.logprobs), finished)


class CompletionShape(_Choices):
    """Completions."""

    prefix = "cmpl-"
    chunk = CompletionChunk
    kind = "text_completion"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._offsets: dict[int, int] = {}

    def whole(self, answers: Sequence[Answered]) -> CompletionReply:
        choices = [
            self._choice(Piece((), answer.text, index, answer.logprobs), finish_reason(answer.summary))
            for index, answer in enumerate(answers)
        ]
        summaries = [answer.summary for answer in answers]
        return CompletionReply(
            self.id,
            self.kind,
            self.created,
            self.asked.model,
            choices,
            usage(summaries),
            figures_of(summaries[0]),
        )

    def _choice(self, piece: Piece, finished: FinishReason | None) -> CompletionChoice:
        before = self._offsets.get(piece.index, 0)
        told = completion_logprobs(piece.logprobs, before)
        self._offsets[piece.index] = before + len(piece.text)
        return CompletionChoice(piece.index, piece.text, told, finished)


def finish_reason(summary: Summary) -> FinishReason:
    """Why an answer ended, in OpenAI's words."""
    if summary.finish_reason == "length":
        return "length"
    return "tool_calls" if summary.finish_reason == "tool_calls" else "stop"


def usage(summaries: Sequence[Summary]) -> Usage:
    """Tokens of all answers."""
    prompt = summaries[0].context_tokens + summaries[0].prompt_tokens
    generated = sum(summary.completion_tokens for summary in summaries)
    return Usage(prompt, generated, prompt + generated, PromptDetails(summaries[0].context_tokens))


def figures_of(summary: Summary) -> Figures:
    """How an answer was made."""
    return Figures(
        method=summary.method,
        method_reason=summary.method_reason,
        budget=summary.budget,
        remainder=summary.remainder,
        seed=summary.seed,
        fraction_of_keys=summary.selection.fraction_all,
        first_token_ms=summary.timings.first_token_ns / 1e6,
        total_ms=summary.timings.total_ns / 1e6,
        cached_context=summary.context.removeprefix("contexts/") or None,
        context=summary.kept_context.removeprefix("contexts/") or None,
    )


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
    """Of chat completions; None where there are none."""
    if not tokens:
        return None
    return ChatLogprobs(
        [
            TokenChosen(
                _text(token),
                _finite(token.logprob),
                list(token.text),
                [
                    TokenTold(_text(other), _finite(other.logprob), list(other.text))
                    for other in token.alternatives
                ],
            )
            for token in tokens
        ]
    )


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs | None:
    """Of completions; None where there are none. offset: of the first token, in characters of the answer."""
    if not tokens:
        return None
    offsets, decoded = [], b""
    for token in tokens:
        offsets.append(offset + len(decoded.decode("utf-8", "replace")))
        decoded += token.text
    return CompletionLogprobs(
        [_text(token) for token in tokens],
        [_finite(token.logprob) for token in tokens],
        [{_text(other): _finite(other.logprob) for other in token.alternatives} for token in tokens],
        offsets,
    )


def _call(call: ToolCall) -> Call:
    return Call(call.id, "function", WholeFunction(call.name, call.arguments))


def _call_delta(part: ToolCallPart) -> CallDelta:
    if not part.id:
        return CallDelta(part.index, CalledFunction(part.arguments_json))
    return CallDelta(part.index, CalledFunction(part.arguments_json, part.name), part.id, "function")


def _text(token: Any) -> str:
    return bytes(token.text).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
