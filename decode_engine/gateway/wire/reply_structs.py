"""What chat completions and completions reply, member by member. What is UNSET is not sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from decode_engine.rpc.answers.explanation import Explanation

FinishReason = Literal["stop", "length", "tool_calls"]


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
    """cached_tokens: those of the context."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of all answers. Those of the context count as part of the prompt that was not computed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


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


class ChatChunk(_Reply, frozen=True):
    """An event of a stream of chat completions."""

    choices: Sequence[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    sparsekv: Figures | UnsetType = UNSET


class CompletionReply(_Reply, frozen=True):
    """A reply of completions."""

    choices: list[CompletionChoice]
    usage: Usage
    sparsekv: Figures


class CompletionChunk(_Reply, frozen=True):
    """An event of a stream of completions."""

    choices: Sequence[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    sparsekv: Figures | UnsetType = UNSET


class TextDelta(Struct, frozen=True):
    """An event of a stream of responses: the next characters of a message."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: tuple[()] = ()
