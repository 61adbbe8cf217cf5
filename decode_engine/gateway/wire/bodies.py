"""What the bodies of OpenAI's endpoints mean for a generation."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode_engine.gateway.wire.endpoints import CHAT, COMPLETIONS, RESPONSES
from decode_engine.gateway.wire.messages_shape import turns_of
from decode_engine.gateway.wire.parameters import Reading
from decode_engine.gateway.wire.response_items import messages_of
from decode_engine.gateway.wire.tool_shapes import choice_of, tools_of
from decode_engine.orders.checking import check_order, constraint_of, stop_tokens, the_one
from decode_engine.orders.fields import BUDGETS, BY_NAME, CONSTRAINTS, FIELDS, Endpoint, split
from decode_engine.orders.order import Constraint, KeepOptions, Order
from decode_engine.settings.request_bounds import MAX_INT32
from index_store.errors import InvalidArgumentError, MethodUnsupportedError, SparseKVError
from index_store.models.conversation.messages import Message, Role

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
        """To all prompts."""
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
    endpoint: Endpoint,
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
    """Values as orders have them. Raises InvalidArgumentError."""
    the_one([*values], BUDGETS, "budget")
    plain = {name: value for name, value in values.items() if name not in CONSTRAINTS}
    stop = plain.get("stop", ())
    plain["stop"] = (stop,) if isinstance(stop, str) else tuple(filter(None, stop))
    plain["stop_token_ids"] = stop_tokens(plain.get("stop_token_ids", ()))
    plain["logit_bias"] = _biases(plain.get("logit_bias", {}))
    return {**plain, "max_tokens": most}


def _constraint(values: Mapping[str, Any], schema: dict[str, Any] | None) -> Constraint | None:
    """What the answer has to be. Raises InvalidArgumentError."""
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
