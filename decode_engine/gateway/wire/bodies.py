"""The tables of parameters of OpenAI's endpoints, and what their bodies mean for a generation."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from decode_engine.gateway.wire.messages_shape import (
    CHOICE,
    ITEM,
    MESSAGE,
    TOOL,
    TOOL_CHOICE,
    choice_of,
    messages_of,
    tools_of,
    turns_of,
)
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
    Reading,
    Variants,
    refused,
    taken,
)
from decode_engine.orders import fields
from decode_engine.orders.fields import BUDGETS, BY_NAME, CONSTRAINTS, FIELDS, FLAG, OBJECT, TEXT, Kind, split
from decode_engine.orders.order import (
    Constraint,
    KeepOptions,
    Order,
    check_order,
    constraint_of,
    stop_tokens,
    the_one,
)
from decode_engine.settings.request_bounds import MAX_INT32
from index_store.errors import InvalidArgumentError, MethodUnsupportedError, SparseKVError
from index_store.models.conversation.messages import Message, Role

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
    *taken("service_tier", "`priority` orders a tenant's own requests"),
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
    refused("continue_final_message", "every message is a finished one, and an answer follows the last"),
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
            "The new turns after the context, or all from the beginning.",
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
    Annotated[list[str], Meta(max_length=100)],
    lambda value: "message.output_text.logprobs" not in value,
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


_PROMPTS = frozenset({"prompt", "text", "token_ids", "messages"})
_MADE_OF = {
    "constraint": ("text", "response_format", "choices", "regex"),
    "budget": ("token_budget", "target_mass", "keep_ratio"),
    "max_tokens": ("max_output_tokens", "max_completion_tokens"),
}
"""Parameters that fields of the server's requests are made of, the last of those that are given."""


_MESSAGE_PART = re.compile(r"(messages\[\d+\](?:\.tool_calls\[\d+\])?)((?:\.\w+)?)")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for.

    order: its `context` as the client names it, "" for none. others: of further prompts, but for these the same. given:
    all that was sent and counts. prompt: the parameter that continues the context. reading: what of it does nothing.
    places: what the client calls parts of messages, where that is something else.
    """

    model: str
    order: Order
    stream: bool
    include_usage: bool
    given: dict[str, Any]
    prompt: str
    reading: Reading
    places: Mapping[str, str]
    others: Sequence[Order] = ()

    @property
    def answers(self) -> int:
        return self.order.answers * (1 + len(self.others))

    def name_parts(self, error: SparseKVError) -> None:
        """Has an error of the server's name what this request has where the server says something of its own field."""
        name_parts(error, self.given, self.prompt, self.places)

    def check_hints(self, template_reads: Collection[str]) -> tuple[str, ...]:
        """What does nothing. Raises InvalidArgumentError for what the model's template would read."""
        hints = dict(self.reading.hints)
        for name in self.given.get("chat_template_kwargs", {}):
            hints[name] = f"chat_template_kwargs.{name[:100]}"
        for name, where in hints.items():
            if name in template_reads:
                raise InvalidArgumentError(
                    f"{where} is not supported: the model's template reads {name}, which cannot be told to it here; "
                    "leave it out",
                    field=where,
                )
        noted = dict(self.reading.taken) | dict.fromkeys(hints.values())
        if "name" not in template_reads and any(
            turn.name and turn.role is not Role.TOOL for turn in self.order.turns
        ):
            noted[f"{self.prompt}.name"] = None
        return tuple(noted)


def chat_order(body: Any) -> Asked:
    """A body of chat completions. Raises InvalidArgumentError."""
    reading = Reading()
    given = CHAT.read(body, reading)
    said = {"turns": turns_of(given["messages"]), "tools": tools_of(given.get("tools", []))}
    if given.get("logprobs"):
        given.setdefault("top_logprobs", 0)
    elif given.get("top_logprobs"):
        raise InvalidArgumentError("top_logprobs is given, but logprobs is not true", field="top_logprobs")
    else:
        given.pop("top_logprobs", None)
    return _asked("chat", given, said, "messages", reading, schema=given.get("response_format"))


def completion_order(body: Any) -> Asked:
    """A body of completions. Raises InvalidArgumentError."""
    reading = Reading()
    if isinstance(body, dict) and body.get("best_of") == body.get("n"):  # all of them are sent
        body = {**body, "best_of": None}
    given = COMPLETIONS.read(body, reading)
    prompts = given["prompt"]
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    given.setdefault("max_tokens", 16)
    said = [{"text" if isinstance(prompt, str) else "prompt": prompt} for prompt in prompts]
    if len(said) > 1 and "keep" in given:
        raise InvalidArgumentError(f"keep is given for {len(said)} prompts, expected one", field="keep")
    first, *others = (_asked("completions", given, one, "prompt", reading) for one in said)
    return replace(first, others=[one.order for one in others])


def response_turns(given: Mapping[str, Any]) -> tuple[tuple[Message, ...], dict[str, str]]:
    """What a response follows, and what its client calls the parts of messages. Raises InvalidArgumentError."""
    items: list[dict[str, Any]] = [{"role": "user", "content": given["input"]}]
    places = {"messages[0]": "input", "messages[0].content": "input"}
    if isinstance(given["input"], list):
        items, places = messages_of(given["input"])
    if "instructions" in given:
        items.insert(0, {"role": "system", "content": given["instructions"]})
        places = {_later(name): place for name, place in places.items()}
        places |= {"messages[0]": "instructions", "messages[0].content": "instructions"}
    try:
        return turns_of(items), places
    except InvalidArgumentError as error:
        rename_parts(error, places)
        raise


def response_order(body: Any) -> Asked:
    """A body of responses. Raises InvalidArgumentError."""
    reading = Reading()
    given = RESPONSES.read(body, reading)
    turns, places = response_turns(given)
    said = {"turns": turns, "tools": tools_of(given.get("tools", []))}
    schema = given.get("text", {}).get("format")
    return _asked("responses", given, said, "input", reading, places, schema)


def name_parts(
    error: SparseKVError, given: Mapping[str, Any], prompt: str, places: Mapping[str, str]
) -> None:
    """Has an error name what a request has where it speaks of a field of the server's own."""
    rename_parts(error, places)
    named = error.metadata.get("field", "")
    if not named and isinstance(error, MethodUnsupportedError):
        named = "method"
    part = named.partition("[")[0]
    if part in _PROMPTS and part != prompt:
        named = prompt
    for name in _MADE_OF.get(part, ()):
        if name in given:
            named = name
    if named:
        error.metadata["field"] = named


def rename_parts(error: SparseKVError, places: Mapping[str, str]) -> None:
    """Has an error call parts of messages what the client calls them."""

    def place(found: re.Match[str]) -> str:
        return places.get(found[0]) or places.get(found[1], found[1]) + found[2]

    error.message = _MESSAGE_PART.sub(place, error.message)
    if "field" in error.metadata:
        error.metadata["field"] = _MESSAGE_PART.sub(place, error.metadata["field"])


def _later(name: str) -> str:
    """The same part, of the message that follows."""
    number, _, rest = name.removeprefix("messages[").partition("]")
    return f"messages[{int(number) + 1}]{rest}"


def _most(given: Mapping[str, Any], names: Collection[str]) -> int | None:
    """The lowest of the caps that are given; what no message can carry is as many as fit."""
    caps = [min(given[name], MAX_INT32) if given[name] > 0 else MAX_INT32 for name in names if name in given]
    return min(caps, default=None)


def _asked(
    endpoint: fields.Endpoint,
    given: dict[str, Any],
    said: Mapping[str, Any],
    prompt: str,
    reading: Reading,
    places: Mapping[str, str] | None = None,
    schema: dict[str, Any] | None = None,
) -> Asked:
    """What a body asks for. said: the prompt, by members of an order. schema: the format.

    Raises InvalidArgumentError.
    """
    values = {field.name: given[name] for field in FIELDS for name in field.names(endpoint) if name in given}
    values |= {"temperature": 1.0, **values}
    try:
        order = Order(
            context=given.get("context", ""),
            **said,
            constraint=_constraint(values, schema_of(schema)),
            **split(_plain(values, _most(given, BY_NAME["max_tokens"].names(endpoint)))),
            choice=choice_of(given),
            keep=_keep(given.get("keep"), turns="turns" in said),
        )
        check_order(order)
    except InvalidArgumentError as error:
        name_parts(error, given, prompt, places or {})
        raise
    stream = bool(given.get("stream", False))
    return Asked(
        model=given["model"],
        order=order,
        stream=stream,
        include_usage=stream and given.get("stream_options", {}).get("include_usage", False),
        given=given,
        prompt=prompt,
        reading=reading,
        places=places or {},
    )


def _plain(values: dict[str, Any], most: int | None) -> dict[str, Any]:
    the_one([*values], BUDGETS, "budget")
    plain = {name: value for name, value in values.items() if name not in CONSTRAINTS}
    stop = plain.get("stop", ())
    plain["stop"] = (stop,) if isinstance(stop, str) else tuple(filter(None, stop))
    plain["stop_token_ids"] = stop_tokens(plain.get("stop_token_ids", ()))
    plain["logit_bias"] = _biases(plain.get("logit_bias", {}))
    return {**plain, "max_tokens": most}


def _constraint(values: Mapping[str, Any], schema: dict[str, Any] | None) -> Constraint | None:
    given = {name: values[name] for name in CONSTRAINTS if name in values}
    if schema is not None:
        given["json_schema"] = json.dumps(schema)
    kind = the_one([*given])
    return None if kind is None else constraint_of(kind, given[kind])  # type: ignore[arg-type]


def _keep(given: dict[str, Any] | None, *, turns: bool) -> KeepOptions | None:
    if given is None:
        return None
    seconds = given.get("ttl_seconds")
    return KeepOptions(
        name=given.get("display_name", ""), ttl_s=None if seconds is None else int(seconds), turns=turns
    )


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Biases by token. Raises InvalidArgumentError for a name that is none."""
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise InvalidArgumentError(
                f"logit_bias has {name[:20]!r}, expected the id of a token", field="logit_bias"
            )
    return {int(name): bias for name, bias in given.items()}


def schema_of(format_: dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema that a response format means, None for free text. Raises InvalidArgumentError without one."""
    if format_ is None or format_["type"] == "text":
        return None
    found = [one["schema"] for one in (format_, format_.get("json_schema", {})) if "schema" in one]
    if len(found) != 1 and (found or format_["type"] == "json_schema"):
        raise InvalidArgumentError(
            f"the format has {len(found)} schemas, expected one, in json_schema", field="constraint"
        )
    schema: dict[str, Any] = found[0] if found else {"type": "object"}
    return schema
