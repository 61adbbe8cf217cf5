"""What completions, chat completions and responses reply, member by member. What is UNSET is not sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from sparsekv.v1.values import Explanation, Look

ENCODER = msgspec.json.Encoder()


class JsonReply(Response):
    """A value or a Struct as the body of a response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return ENCODER.encode(content)


def event(data: Any, name: str | None = None) -> bytes:
    """One event: its data as JSON, or a text as it is."""
    text = data.encode() if isinstance(data, str) else ENCODER.encode(data)
    return b"data: %b\n\n" % text if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), text)


FinishReason = Literal["stop", "length", "tool_calls"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ErrorDetails(Struct, frozen=True):
    """What was wrong. param: the parameter."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Struct, frozen=True):
    """The body of every refusal, and the event that ends a stream which breaks off."""

    error: ErrorDetails


class PromptDetails(Struct, frozen=True):
    """cached_tokens: those of the context. cache_write_tokens: that were stored, with `keep`."""

    cached_tokens: int
    cache_write_tokens: int | UnsetType = UNSET


class CompletionDetails(Struct, frozen=True):
    """Tokens that were drafted and verified: those that the answers have, and the others."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of all answers. Those of the context count as part of the prompt that was not computed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class Figures(Struct, frozen=True):
    """What OpenAI's replies have no place for: how the answer was made, and the fraction of keys that was touched."""

    method: str
    method_reason: str
    budget: str
    remainder: str
    seed: int
    fraction_of_keys: float
    first_token_ms: float
    total_ms: float
    cached_context: str | None
    context: str | None
    explanation: Explanation | UnsetType = UNSET


class CalledFunction(Struct, frozen=True):
    """arguments: a JSON object, or the next characters of one."""

    arguments: str
    name: str | UnsetType = UNSET


class WholeFunction(Struct, frozen=True):
    """A function that is called."""

    name: str
    arguments: str


class Call(Struct, frozen=True):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: WholeFunction


class CallDelta(Struct, frozen=True):
    """A part of a call; id and name are in the first part alone."""

    index: int
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class TokenTold(Struct, frozen=True):
    """A token with its log probability. bytes: its text's, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenChosen(TokenTold, frozen=True):
    """A token of the answer, and the likeliest ones in its place."""

    top_logprobs: list[TokenTold]


class ChatLogprobs(Struct, frozen=True):
    """Of the tokens of a piece."""

    content: list[TokenChosen]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """Of the tokens of a piece. text_offset: where each begins, in characters of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatDelta(Struct, frozen=True):
    """What is new of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatMessage(Struct, frozen=True):
    """An answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class CompletionChoice(Struct, frozen=True):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class _Reply(Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str


class ChatReply(_Reply, frozen=True):
    """A reply of chat completions."""

    choices: list[ChatChoice]
    usage: Usage
    sparsekv: Figures
    looks: list[Look] | UnsetType = UNSET


class ChatChunk(_Reply, frozen=True):
    """An event of a stream of chat completions."""

    choices: Sequence[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    sparsekv: Figures | UnsetType = UNSET
    looks: list[Look] | UnsetType = UNSET


class CompletionReply(_Reply, frozen=True):
    """A reply of completions."""

    choices: list[CompletionChoice]
    usage: Usage
    sparsekv: Figures
    looks: list[Look] | UnsetType = UNSET


class CompletionChunk(_Reply, frozen=True):
    """An event of a stream of completions."""

    choices: Sequence[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    sparsekv: Figures | UnsetType = UNSET
    looks: list[Look] | UnsetType = UNSET


class TextDelta(Struct, frozen=True):
    """An event of a stream of responses: the next characters of a message."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: tuple[()] = ()


class OutputText(Struct, frozen=True, kw_only=True):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class MessageItem(Struct, kw_only=True, tag_field="type", tag="message"):
    """What is said. content: none while it is open."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText]


class CallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function. arguments: none while it is open."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "in_progress"


class InputDetails(Struct, frozen=True):
    """See `PromptDetails`."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """Nothing is thought apart."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    """Tokens, under the names of responses."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(Struct, frozen=True):
    """Why a response is cut."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReply(Struct, kw_only=True):
    """A response, as it is, with what was asked. The last three are there when it has ended."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ItemStatus
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    model: str
    output: list[MessageItem | CallItem]
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    store: bool = False
    truncation: str = "disabled"
    metadata: dict[str, str] = {}
    temperature: float = 1.0
    top_p: float = 1.0
    max_output_tokens: int | None = None
    text: dict[str, Any]
    completed_at: int | UnsetType | None = UNSET
    usage: ResponseUsage | UnsetType = UNSET
    sparsekv: Figures | UnsetType = UNSET
