"""The tables of parameters of OpenAI's endpoints, and what they mean for a generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from decode_engine.config import (
    MAX_ANSWERS,
    MAX_CHOICES,
    MAX_INT32,
    MAX_LOGIT_BIAS,
    MAX_MAX_TOKENS,
    MAX_SEARCH_PERIOD,
    MAX_SEED,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
)
from decode_engine.gateway.messages_shape import turns_of
from decode_engine.gateway.parameters import (
    BIAS,
    FLAG,
    INPUT,
    MESSAGES,
    OBJECT,
    PROMPT,
    TEXT,
    TEXTS,
    TEXTS_ONLY,
    TOKENS,
    Endpoint,
    Parameter,
    integer,
    number,
    pick,
    refused,
    shown,
)
from decode_engine.rpc.client import GenerateOptions
from index_store.errors import InvalidArgumentError

_KEEPS_NOTHING = "nothing about requests is kept here"
_NO_BEST = "all answers are sent; `n` says how many"
_ONLY_TEXT = "models here read and write text"
_NO_TOOLS = "tools stand among the messages of a context, and calls of them come as the model's text"
_CACHE = "what is kept is a context, which `context` names"
_NO_MODERATION = "no moderation is done here"

_OWN = (
    Parameter(
        "context",
        TEXT,
        "The stored context to continue: its display name, id, or the id's first 6 or more digits.",
        required=True,
    ),
    Parameter("method", TEXT, "How keys are found; the context's own by default."),
    Parameter("keep_ratio", number(0, 1, above=True), "Fraction of the keys to keep."),
    Parameter(
        "target_mass", number(0, 1, above=True), "Share of the attention weight that the kept keys hold."
    ),
    Parameter("token_budget", integer(1, MAX_INT32), "Number of keys to keep."),
    Parameter("search_period", integer(1, MAX_SEARCH_PERIOD), "Decode steps that one search serves."),
    Parameter("top_k", integer(0, MAX_INT32), "Sample from this many likeliest tokens; 0 means all."),
    Parameter(
        "repetition_penalty",
        number(0.01, 100),
        "Divides positive scores of tokens that prompt or answer contain, multiplies negative ones.",
    ),
    Parameter("min_tokens", integer(0, MAX_MAX_TOKENS), "Tokens before which the answer does not end."),
    Parameter("stop_token_ids", TOKENS, f"Up to {MAX_STOP_TOKENS} tokens that end the answer."),
    Parameter("regex", TEXT, "The answer matches this regular expression as a whole (Rust's syntax)."),
    Parameter("choices", TEXTS_ONLY, f"The answer is one of these texts, at most {MAX_CHOICES:,}."),
)
_SAMPLING = (
    Parameter(
        "temperature",
        number(0, MAX_TEMPERATURE),
        "Divides the scores before sampling; 0 takes the likeliest token. 1 by default.",
    ),
    Parameter(
        "top_p",
        number(0, 1, above=True),
        "Sample from the smallest set of tokens that reaches this probability.",
    ),
)
_SEED = Parameter("seed", integer(0, MAX_SEED), "The same seed gives the same tokens.")
_STOP = Parameter(
    "stop", TEXTS, "Up to 16 texts of at most 256 characters; the answer ends before one appears."
)
_STREAM = Parameter("stream", FLAG, "Send the answer in pieces, as server-sent events.")
_STREAM_OPTIONS = Parameter(
    "stream_options", OBJECT, "With `stream`: `include_usage` sends the usage before `[DONE]`."
)
_MODEL = Parameter("model", TEXT, "The served model's name, as /v1/models lists it.", required=True)
_PENALTIES = (
    Parameter("n", integer(1, MAX_ANSWERS), "Answers to give, each sampled by a seed of its own."),
    Parameter(
        "frequency_penalty",
        number(-2, 2),
        "Taken from tokens' scores for every time that the answer has them.",
    ),
    Parameter("presence_penalty", number(-2, 2), "Taken from the scores of tokens that the answer has."),
    Parameter(
        "logit_bias",
        BIAS,
        f"Added to tokens' scores, by their ids: -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}.",
    ),
)
_CACHING = (
    refused("prompt_cache_key", _CACHE),
    refused("prompt_cache_options", _CACHE),
    refused("prompt_cache_retention", _CACHE),
)
_END_USERS = (
    refused("user", _KEEPS_NOTHING),
    refused("safety_identifier", _KEEPS_NOTHING),
    refused("metadata", _KEEPS_NOTHING, {}),
)

_MOST_TOKENS = "Most tokens to generate; 256 by default, or fewer where the model's positions end."

CHAT = Endpoint(
    "/v1/chat/completions",
    (
        Parameter(
            "messages",
            MESSAGES,
            "The new turns after the context, the last of the user or a tool.",
            required=True,
        ),
        _MODEL,
        *_OWN,
        Parameter("max_completion_tokens", integer(1, MAX_MAX_TOKENS), _MOST_TOKENS),
        Parameter("max_tokens", integer(1, MAX_MAX_TOKENS), "The older name of `max_completion_tokens`."),
        *_SAMPLING,
        _SEED,
        _STOP,
        _STREAM,
        _STREAM_OPTIONS,
        *_PENALTIES,
        Parameter(
            "logprobs", FLAG, "Send the logarithm of each token's probability, by the model's exact output."
        ),
        Parameter(
            "top_logprobs",
            integer(0, MAX_TOP_LOGPROBS),
            "With `logprobs`: and those of this many likeliest tokens.",
        ),
        Parameter(
            "response_format",
            OBJECT,
            "`json_schema`: the answer is JSON that the schema describes; `json_object`: any object; `text`: anything.",
        ),
        refused("tools", _NO_TOOLS, []),
        refused("tool_choice", _NO_TOOLS, "none", "auto"),
        refused("parallel_tool_calls", _NO_TOOLS, True, False),
        refused("functions", _NO_TOOLS, []),
        refused("function_call", _NO_TOOLS, "none", "auto"),
        refused("modalities", _ONLY_TEXT, ["text"]),
        refused("audio", _ONLY_TEXT),
        refused("prediction", "answers are not predicted by the client"),
        refused("reasoning_effort", "models here have no efforts", "none"),
        refused("verbosity", "models here have no verbosity", "medium"),
        refused("moderation", _NO_MODERATION),
        refused("service_tier", "all requests are served alike", "auto", "default"),
        refused("store", _KEEPS_NOTHING, False),
        refused("web_search_options", "nothing is searched but the context"),
        *_CACHING,
        *_END_USERS,
    ),
)

COMPLETIONS = Endpoint(
    "/v1/completions",
    (
        Parameter("prompt", PROMPT, "What follows the context, word for word.", required=True),
        _MODEL,
        *_OWN,
        Parameter("max_tokens", integer(1, MAX_MAX_TOKENS), "Most tokens to generate, 16 by default."),
        *_SAMPLING,
        _SEED,
        _STOP,
        _STREAM,
        _STREAM_OPTIONS,
        refused("best_of", _NO_BEST, 1),
        refused("echo", "answers do not repeat the prompt", False),
        refused("suffix", "answers do not know what follows them"),
        Parameter(
            "logprobs",
            integer(0, MAX_TOP_LOGPROBS),
            "Send log probabilities of the answer's tokens, and of this many likeliest ones in each place.",
        ),
        *_PENALTIES,
        refused("user", _KEEPS_NOTHING),
    ),
)

RESPONSES = Endpoint(
    "/v1/responses",
    (
        Parameter(
            "input", INPUT, "The new turns after the context: messages, or a text of the user.", required=True
        ),
        _MODEL,
        *_OWN,
        Parameter("max_output_tokens", integer(1, MAX_MAX_TOKENS), _MOST_TOKENS),
        *_SAMPLING,
        _STREAM,
        refused("stream_options", "events are sent as they are", {"include_obfuscation": False}),
        refused("instructions", "what the model is told stands in the context"),
        Parameter(
            "text",
            OBJECT,
            "`format`: `json_schema`, `json_object` or `text`, as `response_format` of chat completions.",
        ),
        refused("tools", _NO_TOOLS, []),
        refused("tool_choice", _NO_TOOLS, "none", "auto"),
        refused("parallel_tool_calls", _NO_TOOLS, True, False),
        refused("max_tool_calls", _NO_TOOLS),
        refused("top_logprobs", "log probabilities are sent by chat completions", 0),
        refused("include", "all there is to tell is in the response", []),
        refused("store", _KEEPS_NOTHING, False),
        refused("previous_response_id", _KEEPS_NOTHING),
        refused("conversation", _KEEPS_NOTHING),
        refused("prompt", _KEEPS_NOTHING),
        refused("background", _KEEPS_NOTHING, False),
        refused("background_options", _KEEPS_NOTHING),
        refused("context_management", "a prompt that is too long is refused"),
        refused("truncation", "a prompt that is too long is refused", "disabled"),
        refused("reasoning", "models here have no efforts"),
        refused("image", _ONLY_TEXT),
        refused("moderation", _NO_MODERATION),
        refused("access_programs", "there are none here"),
        refused("service_tier", "all requests are served alike", "auto", "default"),
        *_CACHING,
        *_END_USERS,
    ),
)

_SAME_NAMES = (
    *("method", "keep_ratio", "target_mass", "token_budget", "search_period"),
    *("top_k", "top_p", "seed", "n", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("min_tokens", "stop_token_ids", "regex", "choices"),
)


@dataclass(frozen=True, slots=True)
class Order:
    """What a request asks for. options: of the generation. given: all that was sent and counts."""

    model: str
    context: str
    options: GenerateOptions
    stream: bool
    include_usage: bool
    given: dict[str, Any]


def chat_order(body: Any) -> Order:
    """A body of chat completions. Raises InvalidArgumentError."""
    given = CHAT.read(body)
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise InvalidArgumentError(
            "max_tokens and max_completion_tokens are given, expected at most one of them", field="max_tokens"
        )
    options: GenerateOptions = {
        "messages": turns_of(given["messages"]),
        "max_tokens": given.get("max_completion_tokens", given.get("max_tokens")),
        "json_schema": schema_of(given.get("response_format"), "response_format"),
    }
    if given.get("logprobs"):
        options["top_logprobs"] = given.get("top_logprobs", 0)
    elif "top_logprobs" in given:
        raise InvalidArgumentError("top_logprobs is given, but logprobs is not true", field="top_logprobs")
    return _order(given, options)


def completion_order(body: Any) -> Order:
    """A body of completions. Raises InvalidArgumentError."""
    given = COMPLETIONS.read(body)
    prompt = given["prompt"]
    options: GenerateOptions = {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
    options["max_tokens"] = given.get("max_tokens", 16)
    options["top_logprobs"] = given.get("logprobs")
    return _order(given, options)


def response_order(body: Any) -> Order:
    """A body of responses. Raises InvalidArgumentError."""
    given = RESPONSES.read(body)
    asked = given["input"]
    options: GenerateOptions = {
        "messages": turns_of([{"role": "user", "content": asked}] if isinstance(asked, str) else asked),
        "max_tokens": given.get("max_output_tokens"),
        "json_schema": _schema_of_text(given.get("text")),
    }
    return _order(given, options)


def _order(given: dict[str, Any], options: GenerateOptions) -> Order:
    stop = given.get("stop", [])
    options["stop"] = [stop] if isinstance(stop, str) else stop
    options["temperature"] = float(given.get("temperature", 1.0))
    options.update(pick(given, _SAME_NAMES))  # type: ignore[typeddict-item]
    options["logit_bias"] = _biases(given.get("logit_bias"))
    stream = bool(given.get("stream", False))
    return Order(
        model=given["model"],
        context=given["context"],
        options=options,
        stream=stream,
        include_usage=_include_usage(given.get("stream_options"), stream),
        given=given,
    )


def _biases(given: dict[str, float] | None) -> dict[int, float] | None:
    """Biases by token. Raises InvalidArgumentError for a name that is none."""
    if given is None:
        return None
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise InvalidArgumentError(
                f"logit_bias has {name[:20]!r}, expected the id of a token", field="logit_bias"
            )
    return {int(name): bias for name, bias in given.items()}


def _schema_of_text(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the `text` of a request for a response wants."""
    if text is None:
        return None
    unknown = set(text) - {"format", "verbosity"}
    if unknown or text.get("verbosity") not in (None, "medium"):
        raise InvalidArgumentError(
            f"text has {sorted(unknown) or ['verbosity']}, expected only format", field="text"
        )
    format_ = text.get("format")
    if isinstance(format_, dict) and format_.get("type") == "json_schema":  # flat, unlike in chat completions
        inner = {name: value for name, value in format_.items() if name != "type"}
        return schema_of({"type": "json_schema", "json_schema": inner}, "text")
    return schema_of(format_, "text")


def schema_of(format_: Any, field: str) -> dict[str, Any] | None:
    """The JSON schema that a response format means, None for free text. Raises InvalidArgumentError."""
    if format_ is None or format_ == {"type": "text"}:
        return None
    if format_ == {"type": "json_object"}:
        return {"type": "object"}
    inner = format_.get("json_schema") if isinstance(format_, dict) else None
    if (
        isinstance(inner, dict)
        and set(format_) == {"type", "json_schema"}
        and format_["type"] == "json_schema"
    ):
        schema = inner.get("schema")
        if isinstance(schema, dict) and not set(inner) - {"name", "description", "schema", "strict"}:
            return schema
    raise InvalidArgumentError(
        f"{field} is {shown(format_)}, expected the type text, json_object, or json_schema with a name and a schema",
        field=field,
    )


def _include_usage(options: dict[str, Any] | None, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise InvalidArgumentError("stream_options is given, but stream is not", field="stream_options")
    unknown = set(options) - {"include_usage", "include_obfuscation"}
    if unknown or options.get("include_obfuscation"):
        raise InvalidArgumentError(
            f"stream_options has {sorted(unknown) or ['include_obfuscation']}, expected only include_usage",
            field="stream_options",
        )
    wanted = options.get("include_usage", False)
    if not isinstance(wanted, bool):
        raise InvalidArgumentError("stream_options.include_usage is no true or false", field="stream_options")
    return wanted
