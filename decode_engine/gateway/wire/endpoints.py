"""The tables of parameters of OpenAI's endpoints."""

from __future__ import annotations

from decode_engine.gateway.wire.parameters import (
    BIAS,
    FLAG,
    INPUT,
    KEEP,
    MESSAGES,
    OBJECT,
    PROMPT,
    TEXT,
    TEXTS,
    TEXTS_ONLY,
    TOKENS,
    TOOLS,
    Endpoint,
    Kind,
    Parameter,
    integer,
    number,
    refused,
)
from decode_engine.gateway.wire.response_items import FLAT_TOOL_CHOICE
from decode_engine.gateway.wire.tool_shapes import TOOL_CHOICE
from decode_engine.settings.request_bounds import (
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

_KEEPS_NOTHING = "nothing about requests is kept here"
_NO_BEST = "all answers are sent; `n` says how many"
_ONLY_TEXT = "models here read and write text"
_OLD_TOOLS = "`tools` and `tool_choice` take its place"
_CACHE = "what is kept is a context, which `context` names"
_NO_MODERATION = "no moderation is done here"

_OWN = (
    Parameter(
        "context",
        TEXT,
        "The stored context to continue: its display name, id, or the id's first 6 or more digits. By default the "
        "request is all there is; the longest stored context that it begins with, word for word, is not read anew, and "
        "is `sparsekv.cached_context` of the reply.",
    ),
    Parameter(
        "keep",
        KEEP,
        "Keep the session as a context that continues this one: `display_name`, `ttl_seconds`, both optional. Its id "
        "is `sparsekv.context` of the reply. Not with tools, `n`, `regex`, `choices` and formats.",
    ),
    Parameter(
        "method", TEXT, "How keys are found; `auto`, and by default what the server has it, chooses by time."
    ),
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


def _calling(choice: Kind) -> tuple[Parameter, ...]:
    """Parameters about tools. choice: how one is chosen, which endpoints spell in ways of their own."""
    return (
        Parameter(
            "tools", TOOLS, "Functions that the model may call, by names and schemas of their arguments."
        ),
        Parameter(
            "tool_choice",
            choice,
            "Whether it calls some: `auto` where there are tools; of `required` and a named one arguments satisfy the "
            "schema, as those of functions that are `strict` always do.",
        ),
        Parameter("parallel_tool_calls", FLAG, "Whether it may make several calls at once; true by default."),
    )


_MOST_TOKENS = "Most tokens to generate; 256 by default, or fewer where the model's positions end."

CHAT = Endpoint(
    "/v1/chat/completions",
    (
        Parameter(
            "messages",
            MESSAGES,
            "The new turns after the context, or all from the beginning; the last is of the user or a tool.",
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
            "`json_schema`: the answer is JSON that the schema describes, `strict` or not, without the model being "
            "told; `json_object`: any object; `text`: anything.",
        ),
        *_calling(TOOL_CHOICE),
        refused("functions", _OLD_TOOLS, []),
        refused("function_call", _OLD_TOOLS, "none", "auto"),
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
        Parameter(
            "prompt",
            PROMPT,
            "What follows the context, word for word, or a text from its beginning.",
            required=True,
        ),
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
            "input",
            INPUT,
            "The new turns after the context, or all from the beginning: messages, calls (`function_call`) and what "
            "they gave (`function_call_output`), or a text of the user.",
            required=True,
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
        *_calling(FLAT_TOOL_CHOICE),
        refused("max_tool_calls", "there are no tools but functions, which clients run"),
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
