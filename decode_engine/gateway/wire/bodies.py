"""What the bodies of OpenAI's endpoints mean for a generation."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from decode_engine.gateway.wire.endpoints import CHAT, COMPLETIONS, RESPONSES
from decode_engine.gateway.wire.messages_shape import turns_of
from decode_engine.gateway.wire.parameters import Reading, pick
from decode_engine.gateway.wire.response_items import messages_of
from decode_engine.gateway.wire.tool_shapes import call_options
from decode_engine.rpc.client import GenerateOptions, Keep
from decode_engine.settings.request_bounds import MAX_INT32
from index_store.errors import InvalidArgumentError, MethodUnsupportedError, SparseKVError
from index_store.models.conversation.messages import Message, Role

_SAME_NAMES = (
    *("method", "keep_ratio", "target_mass", "token_budget", "search_period"),
    *("top_k", "top_p", "seed", "n", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("min_tokens", "stop_token_ids", "regex", "choices"),
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
class Order:
    """What a request asks for.

    context: "" where it names none. options: of the generation. given: all that was sent and counts. prompt: the
    parameter that continues the context. reading: what of it does nothing. places: what the client calls parts of
    messages, where that is something else.
    """

    model: str
    context: str
    options: GenerateOptions
    stream: bool
    include_usage: bool
    given: dict[str, Any]
    prompt: str
    reading: Reading
    places: Mapping[str, str] = field(default_factory=dict)

    def name_parts(self, error: SparseKVError) -> None:
        """Has an error of the server's name what this request has where the server says something of its own field."""
        rename_parts(error, self.places)
        named = error.metadata.get("field", "")
        if not named and isinstance(error, MethodUnsupportedError):
            named = "method"
        part = named.partition("[")[0]
        if part in _PROMPTS and part != self.prompt:
            named = self.prompt
        for name in _MADE_OF.get(part, ()):
            if name in self.given:
                named = name
        if named:
            error.metadata["field"] = named

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
        said = self.options.get("messages") or ()
        if "name" not in template_reads and any(turn.name and turn.role is not Role.TOOL for turn in said):
            noted[f"{self.prompt}.name"] = None
        return tuple(noted)


def chat_order(body: Any) -> Order:
    """A body of chat completions. Raises InvalidArgumentError."""
    reading = Reading()
    given = CHAT.read(body, reading)
    options: GenerateOptions = {
        "messages": turns_of(given["messages"]),
        "max_tokens": _most(given, "max_tokens", "max_completion_tokens"),
        "json_schema": schema_of(given.get("response_format")),
        **call_options(given),
    }
    if given.get("logprobs"):
        options["top_logprobs"] = given.get("top_logprobs", 0)
    elif given.get("top_logprobs"):
        raise InvalidArgumentError("top_logprobs is given, but logprobs is not true", field="top_logprobs")
    return _order(given, options, "messages", reading)


def completion_order(body: Any) -> Order:
    """A body of completions. Raises InvalidArgumentError."""
    reading = Reading()
    given = COMPLETIONS.read(body, reading)
    prompt = given["prompt"]
    if isinstance(prompt[0], str | list) and isinstance(prompt, list):
        (prompt,) = prompt
    options: GenerateOptions = {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
    options["max_tokens"] = _most(given, "max_tokens") or 16
    options["top_logprobs"] = given.get("logprobs")
    return _order(given, options, "prompt", reading)


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


def response_order(body: Any) -> Order:
    """A body of responses. Raises InvalidArgumentError."""
    reading = Reading()
    given = RESPONSES.read(body, reading)
    turns, places = response_turns(given)
    options: GenerateOptions = {
        "messages": turns,
        "max_tokens": _most(given, "max_output_tokens"),
        "json_schema": schema_of(given.get("text", {}).get("format")),
        **call_options(given),
    }
    return _order(given, options, "input", reading, places)


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


def _most(given: dict[str, Any], *names: str) -> int | None:
    """The lowest of the caps that are given; what no message can carry is as many as fit."""
    caps = [min(given[name], MAX_INT32) if given[name] > 0 else MAX_INT32 for name in names if name in given]
    return min(caps, default=None)


def _order(
    given: dict[str, Any],
    options: GenerateOptions,
    prompt: str,
    reading: Reading,
    places: Mapping[str, str] | None = None,
) -> Order:
    stop = given.get("stop", [])
    options["stop"] = [stop] if isinstance(stop, str) else stop
    options["temperature"] = float(given.get("temperature", 1.0))
    options.update(pick(given, _SAME_NAMES))  # type: ignore[typeddict-item]
    options["logit_bias"] = _biases(given.get("logit_bias"))
    options["keep"] = _keep(given.get("keep"))
    stream = bool(given.get("stream", False))
    return Order(
        model=given["model"],
        context=given.get("context", ""),
        options=options,
        stream=stream,
        include_usage=stream and given.get("stream_options", {}).get("include_usage", False),
        given=given,
        prompt=prompt,
        reading=reading,
        places=places or {},
    )


def _keep(given: dict[str, Any] | None) -> Keep | None:
    if given is None:
        return None
    seconds = given.get("ttl_seconds")
    return Keep(given.get("display_name", ""), None if seconds is None else timedelta(seconds=seconds))


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


def schema_of(format_: dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema that a response format means, None for free text."""
    if format_ is None or format_["type"] == "text":
        return None
    schema: dict[str, Any] = {"type": "object"}
    if format_["type"] == "json_schema":
        schema = format_.get("json_schema", format_)["schema"]
    return schema
