"""What the bodies of OpenAI's endpoints mean for a generation."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from decode_engine.gateway.wire.endpoints import CHAT, COMPLETIONS, RESPONSES
from decode_engine.gateway.wire.messages_shape import turns_of
from decode_engine.gateway.wire.parameters import pick, shown
from decode_engine.gateway.wire.response_items import messages_of
from decode_engine.gateway.wire.tool_shapes import call_options
from decode_engine.rpc.client import GenerateOptions, Keep
from index_store.errors import InvalidArgumentError, MethodUnsupportedError, SparseKVError

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


@dataclass(frozen=True, slots=True)
class Order:
    """What a request asks for.

    context: "" where it names none. options: of the generation. given: all that was sent and counts. prompt: the
    parameter that continues the context.
    """

    model: str
    context: str
    options: GenerateOptions
    stream: bool
    include_usage: bool
    given: dict[str, Any]
    prompt: str

    def name_parts(self, error: SparseKVError) -> None:
        """Has an error of the server's name the parameter of this request that its own field was made of."""
        field = error.metadata.get("field", "")
        if not field and isinstance(error, MethodUnsupportedError):
            field = "method"
        part = field.partition("[")[0]
        if part in _PROMPTS and part != self.prompt:
            field = self.prompt
        for name in _MADE_OF.get(part, ()):
            if name in self.given:
                field = name
        if field:
            error.metadata["field"] = field


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
        **call_options(given),
    }
    if given.get("logprobs"):
        options["top_logprobs"] = given.get("top_logprobs", 0)
    elif "top_logprobs" in given:
        raise InvalidArgumentError("top_logprobs is given, but logprobs is not true", field="top_logprobs")
    return _order(given, options, "messages")


def completion_order(body: Any) -> Order:
    """A body of completions. Raises InvalidArgumentError."""
    given = COMPLETIONS.read(body)
    prompt = given["prompt"]
    options: GenerateOptions = {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
    options["max_tokens"] = given.get("max_tokens", 16)
    options["top_logprobs"] = given.get("logprobs")
    return _order(given, options, "prompt")


def response_order(body: Any) -> Order:
    """A body of responses. Raises InvalidArgumentError."""
    given = RESPONSES.read(body)
    asked = given["input"]
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else messages_of(asked)
    try:
        turns = turns_of(items)
    except InvalidArgumentError as error:
        error.metadata["field"] = "input"
        raise
    options: GenerateOptions = {
        "messages": turns,
        "max_tokens": given.get("max_output_tokens"),
        "json_schema": _schema_of_text(given.get("text")),
        **call_options(given),
    }
    return _order(given, options, "input")


def _order(given: dict[str, Any], options: GenerateOptions, prompt: str) -> Order:
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
        include_usage=_include_usage(given.get("stream_options"), stream),
        given=given,
        prompt=prompt,
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
