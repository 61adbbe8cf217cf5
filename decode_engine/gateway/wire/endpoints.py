"""The tables of parameters of OpenAI's endpoints."""

from __future__ import annotations

from collections.abc import Mapping

from decode_engine.gateway.wire.messages_shape import MESSAGE
from decode_engine.gateway.wire.parameters import (
    INPUT,
    MESSAGES,
    PROMPT,
    TOOLS,
    TTL,
    Endpoint,
    Fate,
    Members,
    Parameter,
    Variants,
    refused,
    taken,
)
from decode_engine.gateway.wire.response_items import ITEM
from decode_engine.gateway.wire.tool_shapes import CHOICE, TOOL, TOOL_CHOICE
from decode_engine.orders import fields
from decode_engine.orders.kinds import FLAG, OBJECT, TEXT, Kind, list_of

_KEEPS_NOTHING = "nothing about requests is kept here"
_CUT = "`top_p` and `top_k` cut the choice here"
_SAMPLED = "answers are sampled"
_ONLY_TEXT = "models here read and write text"
_OLD_TOOLS = "`tools` and `tool_choice` take its place"
_UNTOLD = "the model's template does not read it; refused on a model whose template does"
_FREE = "every text that is allowed is as the model has it"

_NOTES = (
    *taken("user safety_identifier metadata store", _KEEPS_NOTHING),
    *taken(
        "prompt_cache_key prompt_cache_options prompt_cache_retention",
        "stored beginnings are found by their tokens",
    ),
    *taken("service_tier priority", "all requests are served alike"),
    *taken("provider models route usage", "one model is served, and its usage is told"),
)
"""Labels and hints that clients always send."""
_THOUGHT = (
    *taken("reasoning_effort", _UNTOLD, "reasoning_effort", "enable_thinking", "thinking"),
    *taken("thinking enable_thinking think", _UNTOLD, "enable_thinking", "thinking", "reasoning_effort"),
    *taken("thinking_budget", _UNTOLD, "thinking_budget", "enable_thinking", "thinking"),
    *taken("include_reasoning reasoning_format", "models here tell all that they say"),
)
_NEIGHBOURS = (
    *(refused(name, _CUT, 0, 0.0) for name in ("min_p", "top_a", "mirostat")),
    *(refused(name, _CUT, 1, 1.0) for name in ("typical_p", "tfs", "tfs_z")),
    *(refused(name, _SAMPLED) for name in ("use_beam_search", "early_stopping")),
    *(refused(name, _SAMPLED, 1, 1.0) for name in ("length_penalty", "num_beams")),
    refused("do_sample", "`temperature` 0 takes the likeliest token", True),
    refused("repeat_penalty", "`repetition_penalty` takes its place", 1, 1.0),
    refused("best_of", "all answers are sent; `n` says how many", 1),
    refused("detokenize", "answers are text", True),
    refused("return_token_ids", "answers are text"),
    *(refused(name, "nothing is searched but the context") for name in ("search", "enable_search")),
    refused("safe_prompt", "nothing is said but what was sent"),
    *taken("num_ctx", "a prompt that is too long is refused in any case"),
    refused("ignore_eos", "`min_tokens` is how an answer goes on"),
    refused("skip_special_tokens", _FREE, True),
    refused("spaces_between_special_tokens", _FREE, True),
    refused("include_stop_str_in_output", "the answer ends before a stop text"),
    refused("guided_json", "`response_format` takes its place"),
    refused("guided_regex", "`regex` takes its place"),
    refused("guided_choice", "`choices` takes its place"),
    refused("echo", "answers do not repeat the prompt"),
    refused("prompt_logprobs", "the gRPC API has them", 0),
    refused("extra_body", "it is a client's word; send what is in it beside the other parameters"),
)
"""What other servers have."""
TEMPLATE = (
    refused("add_special_tokens", "the model's template adds them", True, False),
    refused("add_generation_prompt", "an answer always follows", True),
    refused("continue_final_message", "the last message is of a user, a tool or a system"),
    refused("chat_template", "the model's own is used"),
    Parameter(
        "chat_template_kwargs",
        OBJECT,
        "Members that the model's template does not read are taken; those that it reads are refused.",
    ),
)

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
        OBJECT,
        "Keep the session as a context that continues this one: `display_name`, `ttl_seconds`, both optional. Its id "
        "is `sparsekv.context` of the reply. Not with tools, `n`, `regex`, `choices` and formats.",
        inside=Members(
            "what is kept",
            (
                Parameter("display_name", TEXT, "What people call it; the context's name by default."),
                Parameter("ttl_seconds", TTL, "How long it lives; for good by default."),
            ),
        ),
        empty_counts=True,
    ),
)


def _fields(endpoint: fields.Endpoint) -> tuple[Parameter, ...]:
    """What the table of fields has for an endpoint."""
    return tuple(
        Parameter(name, field.kind, _SAID.get((endpoint, name), field.says), neutral=_UNSET.get(name, ()))
        for field in fields.FIELDS
        for name in field.names(endpoint)
    )


_SAID: Mapping[tuple[fields.Endpoint, str], str] = {
    ("chat", "max_tokens"): "The older name of `max_completion_tokens`; of both the lower one counts.",
    ("completions", "max_tokens"): fields.BY_NAME["max_tokens"].says.replace("256", "16"),
    ("chat", "top_logprobs"): "With `logprobs`: and those of this many likeliest tokens.",
}
"""Where a sentence of the table says too little of one endpoint."""
_UNSET: Mapping[str, tuple[int, ...]] = {"top_k": (-1,), "seed": (-1,)}
"""How other servers say that one is left to them."""
_STREAM = Parameter("stream", FLAG, "Send the answer in pieces, as server-sent events.")
_STREAM_OPTIONS = Parameter(
    "stream_options",
    OBJECT,
    "Of a stream.",
    inside=Members(
        "options of a stream",
        (
            Parameter("include_usage", FLAG, "Whether the usage is sent before `[DONE]`."),
            *taken("include_obfuscation continuous_usage_stats", "events are sent as they are"),
        ),
    ),
)
_MODEL = Parameter("model", TEXT, "The served model's name, as /v1/models lists it.", required=True)
_CALLING = (
    Parameter(
        "tools",
        TOOLS,
        "Functions that the model may call, by names and schemas of their arguments.",
        inside=TOOL,
    ),
    Parameter(
        "tool_choice",
        TOOL_CHOICE,
        "Whether it calls some: `auto` where there are tools; of `required` and a named one arguments satisfy the "
        "schema, as those of functions that are `strict` always do.",
        inside=CHOICE,
    ),
    Parameter("parallel_tool_calls", FLAG, "Whether it may make several calls at once; true by default."),
)
_SCHEMA = (
    Parameter("schema", OBJECT, "The JSON schema.", empty_counts=True),
    Parameter("name", TEXT, "Its name, for people."),
    Parameter("strict", FLAG, "Either way the answer keeps to it."),
    *taken("description", "the model is not told of it"),
)


_JSON = Members(
    "a format",
    (
        Parameter(
            "json_schema",
            OBJECT,
            "The schema; or its members stand here.",
            inside=Members("a schema", _SCHEMA),
        ),
        *_SCHEMA,
    ),
)
_FORMAT = Variants(
    "type", {"text": Members("a format without a schema", ()), "json_object": _JSON, "json_schema": _JSON}
)


CHAT = Endpoint(
    "/v1/chat/completions",
    (
        Parameter(
            "messages",
            MESSAGES,
            "The new turns after the context, or all from the beginning; the last is none of an assistant.",
            required=True,
            inside=MESSAGE,
        ),
        _MODEL,
        *_OWN,
        *_fields("chat"),
        _STREAM,
        _STREAM_OPTIONS,
        Parameter(
            "logprobs", FLAG, "Send the logarithm of each token's probability, by the model's exact output."
        ),
        Parameter(
            "response_format",
            OBJECT,
            "`json_schema`: the answer is JSON that the schema describes, `strict` or not, without the model being "
            "told; `json_object`: any object, or one of a schema; `text`: anything.",
            inside=_FORMAT,
        ),
        *_CALLING,
        refused("functions", _OLD_TOOLS),
        refused("function_call", _OLD_TOOLS, "none", "auto"),
        refused("modalities", _ONLY_TEXT, ["text"]),
        refused("audio", _ONLY_TEXT),
        *taken("prediction", "it would change times alone"),
        refused("moderation", "no moderation is done here"),
        refused("web_search_options", "nothing is searched but the context"),
        *taken("verbosity", _UNTOLD, "verbosity"),
        *taken("reasoning", _UNTOLD, "reasoning_effort", "enable_thinking", "thinking"),
        *_THOUGHT,
        *_NOTES,
        *_NEIGHBOURS,
        *TEMPLATE,
    ),
)

COMPLETIONS = Endpoint(
    "/v1/completions",
    (
        Parameter(
            "prompt",
            PROMPT,
            "What follows the context, word for word, or a text from its beginning. Of several prompts the answers to "
            "the second are numbered behind the `n` to the first.",
            required=True,
        ),
        _MODEL,
        *_OWN,
        *_fields("completions"),
        _STREAM,
        _STREAM_OPTIONS,
        refused("add_special_tokens", "a text from its beginning has them, one behind a context none", True),
        refused("suffix", "answers do not know what follows them"),
        *_NOTES,
        *_NEIGHBOURS,
    ),
)

_INCLUDED = Kind(
    "a list of texts without message.output_text.logprobs, which chat completions send",
    lambda value: list_of(TEXT, 100)(value) and "message.output_text.logprobs" not in value,
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
            inside=ITEM,
        ),
        Parameter("instructions", TEXT, "A message of a system before all others."),
        _MODEL,
        *_OWN,
        *_fields("responses"),
        _STREAM,
        *taken("stream_options", "events are sent as they are"),
        Parameter(
            "text",
            OBJECT,
            "What the answer has to be.",
            inside=Members(
                "the text of a response",
                (
                    Parameter(
                        "format",
                        OBJECT,
                        "`json_schema`, `json_object` or `text`, as `response_format` of chat completions.",
                        inside=_FORMAT,
                    ),
                    *taken("verbosity", _UNTOLD, "verbosity"),
                ),
            ),
        ),
        *_CALLING,
        *taken("max_tool_calls", "there are no tools but functions, which clients run"),
        refused("top_logprobs", "log probabilities are sent by chat completions", 0),
        Parameter("include", _INCLUDED, "all there is to tell is in the response", Fate.TAKEN),
        refused("previous_response_id", f"{_KEEPS_NOTHING}; send the items of the conversation as `input`"),
        refused("conversation", f"{_KEEPS_NOTHING}; send the items of the conversation as `input`"),
        refused("prompt", _KEEPS_NOTHING),
        refused("background", _KEEPS_NOTHING),
        refused("background_options", _KEEPS_NOTHING),
        refused("context_management", "a prompt that is too long is refused"),
        *taken("truncation", "a prompt that is too long is refused in any case"),
        *taken("reasoning", _UNTOLD, "reasoning_effort", "enable_thinking", "thinking"),
        *_THOUGHT,
        refused("image", _ONLY_TEXT),
        refused("moderation", "no moderation is done here"),
        refused("access_programs", "there are none here"),
        *_NOTES,
        *_NEIGHBOURS,
    ),
)
