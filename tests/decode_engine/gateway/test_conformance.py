"""The official client's own lists of parameters: each is honoured, refused by its name, or taken and told.

A parameter that a later version of the client brings fails here until somebody decides about it.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import pytest
from openai.types import CompletionCreateParams, shared_params
from openai.types import chat as chats
from openai.types import responses as answers
from openai.types.chat import CompletionCreateParams as ChatParams
from openai.types.responses import ResponseCreateParams
from openai.types.responses.response_input_item_param import FunctionCallOutput
from openai.types.shared_params.response_format_json_schema import JSONSchema

from decode_engine.gateway.wire.bodies import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    Asked,
    chat_order,
    completion_order,
    response_order,
)
from decode_engine.gateway.wire.parameters import Endpoint, Fate
from index_store.errors import InvalidArgumentError

SAID: Any = {"role": "user", "content": "Who?"}
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION: Any = {"name": "look", "parameters": SCHEMA}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
FLAT_TOOL: Any = {"type": "function", **FUNCTION}
JUNK: Any = {"what": "ever"}

READ: dict[str, tuple[Endpoint, Callable[[Any], Asked], Any]] = {
    CHAT.path: (CHAT, chat_order, {"model": "m", "messages": [SAID]}),
    COMPLETIONS.path: (COMPLETIONS, completion_order, {"model": "m", "prompt": "x"}),
    RESPONSES.path: (RESPONSES, response_order, {"model": "m", "input": "x"}),
}

# What each parameter that is read is given here, beside what it needs.
GIVEN: dict[str, Any] = {
    **{"messages": [{**SAID, "content": "Why?"}], "prompt": "y", "input": "y", "model": "other"},
    **{"context": "lamp", "keep": {"display_name": "kept", "ttl_seconds": 60}},
    **{"method": "full", "keep_ratio": 0.5, "target_mass": 0.5, "token_budget": 5, "search_period": 2},
    **{"top_k": 5, "repetition_penalty": 1.5, "min_tokens": 1, "stop_token_ids": [5], "ignore_eos": True},
    **{"regex": "a+", "choices": ["a"], "max_completion_tokens": 7, "max_tokens": 7, "max_output_tokens": 7},
    **{
        "temperature": 0.5,
        "top_p": 0.5,
        "seed": 3,
        "stop": "x",
        "stream": True,
        "explain": True,
        "map_every": 4,
        "priority": 3,
    },
    **{"n": 2, "frequency_penalty": 1, "presence_penalty": 1, "logit_bias": {"5": 1}},
    **{"response_format": {"type": "json_object"}, "text": {"format": {"type": "json_object"}}},
    **{"tools": [CHAT_TOOL], "parallel_tool_calls": False, "instructions": "Be brief."},
}
BESIDE: dict[tuple[str, str], Any] = {
    (CHAT.path, "stream_options"): {"stream": True},
    (COMPLETIONS.path, "stream_options"): {"stream": True},
    (CHAT.path, "top_logprobs"): {"logprobs": True},
    (CHAT.path, "parallel_tool_calls"): {"tools": [CHAT_TOOL]},
    (RESPONSES.path, "parallel_tool_calls"): {"tools": [CHAT_TOOL]},
}
ONE_FOR_EACH: dict[tuple[str, str], Any] = {
    (CHAT.path, "logprobs"): True,
    (COMPLETIONS.path, "logprobs"): 2,
    (CHAT.path, "top_logprobs"): 2,
    (CHAT.path, "stream_options"): {"include_usage": True},
    (COMPLETIONS.path, "stream_options"): {"include_usage": True},
    (CHAT.path, "tool_choice"): {"type": "function", "function": {"name": "look"}},
    (RESPONSES.path, "tool_choice"): {"type": "function", "name": "look"},
}


def meant(order: Asked) -> Any:
    """What is made of a body: all but the body itself."""
    return (order.model, order.stream, order.include_usage, order.order)


@pytest.mark.parametrize(
    ("path", "official"),
    [
        (CHAT.path, ChatParams),
        (COMPLETIONS.path, CompletionCreateParams),
        (RESPONSES.path, ResponseCreateParams),
    ],
)
def test_every_parameter_of_the_official_client_is_decided_upon(path: str, official: Any) -> None:
    known = {name for kind in typing.get_args(official) for name in typing.get_type_hints(kind)}
    listed = [parameter.name for parameter in READ[path][0].parameters]
    assert known - set(listed) == set()
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, parameter.name) for path, (endpoint, *_) in READ.items() for parameter in endpoint.parameters],
)
def test_each_is_what_its_table_says(path: str, name: str) -> None:
    endpoint, read, body = READ[path]
    (parameter,) = [parameter for parameter in endpoint.parameters if parameter.name == name]
    beside = {**body, **BESIDE.get((path, name), {})}
    if not parameter.required:
        for empty in (None, *([] if parameter.empty_counts else ["", [], {}]), *parameter.neutral):
            assert meant(read({**beside, name: empty})) == meant(read(beside))
    wrong: Any = {"what": ["ever"]} if name != "keep" else "x"
    if parameter.fate is Fate.REFUSED:
        with pytest.raises(InvalidArgumentError, match="is not supported: ") as caught:
            read({**body, name: JUNK})
        assert (caught.value.metadata["field"], parameter.says in caught.value.message) == (name, True)
    elif parameter.fate is Fate.TAKEN:
        value = ["reasoning.encrypted_content"] if name == "include" else JUNK
        order = read({**beside, name: value})
        assert (meant(order), order.check_hints(())) == (meant(read(beside)), (name,))
        for variable in parameter.read_by:
            with pytest.raises(InvalidArgumentError, match=f"template reads {variable}") as caught:
                order.check_hints((variable,))
            assert caught.value.metadata["field"] == name
    elif name == "chat_template_kwargs":
        order = read({**body, name: {"enable_thinking": False}})
        assert order.check_hints(()) == ("chat_template_kwargs.enable_thinking",)
        with pytest.raises(InvalidArgumentError, match="template reads enable_thinking"):
            order.check_hints(("enable_thinking",))
    else:
        value = ONE_FOR_EACH.get((path, name), GIVEN.get(name))
        assert value is not None, "say here what it is given"
        assert meant(read({**beside, name: value})) != meant(read(beside)), "it changes nothing"
        with pytest.raises(InvalidArgumentError) as caught:
            read({**beside, name: wrong})
        assert caught.value.metadata["field"].startswith(name)


def of_message(role: str, **more: Any) -> Callable[[dict[str, Any]], Any]:
    before = [SAID, {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "look"}}]}]
    said = {"role": role, "content": "x", **more}
    first = role in ("system", "developer", "assistant")
    return lambda extra: chat_order(
        {"model": "m", "messages": [{**said, **extra}, SAID] if first else [*before, {**said, **extra}]}
    )


def of_items(item: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda extra: response_order({"model": "m", "input": [SAID, {**item, **extra}, SAID]})


def of_chat(name: str, **more: Any) -> Callable[[Any], Any]:
    return lambda extra: chat_order({"model": "m", "messages": [SAID], **more, name: extra})


CALL: Any = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
PART: Any = {"type": "text", "text": "x"}
FLAT_CALL: Any = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "a", "output": "x"}
FORMAT: Any = {"type": "json_schema", "name": "a", "schema": SCHEMA}

# Kinds of objects inside of parameters: a function that reads one with further members, and those that are honoured.
INSIDE: dict[str, tuple[Any, Callable[[Any], Any], set[str]]] = {
    "stream options": (
        chats.ChatCompletionStreamOptionsParam,
        lambda extra: of_chat("stream_options", stream=True)({"include_usage": True, **extra}),
        {"include_usage"},
    ),
    "a system's message": (
        chats.ChatCompletionSystemMessageParam,
        of_message("system"),
        {"role", "content", "name"},
    ),
    "a developer's message": (
        chats.ChatCompletionDeveloperMessageParam,
        of_message("developer"),
        {"role", "content", "name"},
    ),
    "a user's message": (
        chats.ChatCompletionUserMessageParam,
        of_message("user"),
        {"role", "content", "name"},
    ),
    "an assistant's message": (
        chats.ChatCompletionAssistantMessageParam,
        of_message("assistant"),
        {"role", "content", "name", "tool_calls"},
    ),
    "a tool's message": (
        chats.ChatCompletionToolMessageParam,
        of_message("tool", tool_call_id="a"),
        {"role", "content", "tool_call_id"},
    ),
    "a part": (
        chats.ChatCompletionContentPartTextParam,
        lambda extra: of_message("user")({"content": [{**PART, **extra}]}),
        {"type", "text"},
    ),
    "a call": (
        chats.ChatCompletionMessageFunctionToolCallParam,
        lambda extra: of_message("assistant")({"tool_calls": [{**CALL, **extra}]}),
        {"id", "type", "function"},
    ),
    "a tool": (
        chats.ChatCompletionFunctionToolParam,
        lambda extra: of_chat("tools")([{**CHAT_TOOL, **extra}]),
        {"type", "function"},
    ),
    "a function": (
        shared_params.FunctionDefinition,
        lambda extra: of_chat("tools")([{"type": "function", "function": {**FUNCTION, **extra}}]),
        {"name", "description", "parameters", "strict"},
    ),
    "a choice": (
        chats.ChatCompletionNamedToolChoiceParam,
        lambda extra: of_chat("tool_choice")({"type": "function", "function": {"name": "look"}, **extra}),
        {"type", "function"},
    ),
    "a format": (
        shared_params.ResponseFormatJSONSchema,
        lambda extra: of_chat("response_format")(
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}, **extra}
        ),
        {"type", "json_schema"},
    ),
    "a schema": (
        JSONSchema,
        lambda extra: of_chat("response_format")(
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, **extra}}
        ),
        {"name", "schema", "strict"},
    ),
    "a response's text": (
        answers.ResponseTextConfigParam,
        lambda extra: response_order({"model": "m", "input": "x", "text": extra}),
        {"format"},
    ),
    "a response's format": (
        answers.ResponseFormatTextJSONSchemaConfigParam,
        lambda extra: response_order({"model": "m", "input": "x", "text": {"format": {**FORMAT, **extra}}}),
        {"type", "name", "schema", "strict"},
    ),
    "a response's function": (
        answers.FunctionToolParam,
        lambda extra: response_order({"model": "m", "input": "x", "tools": [{**FLAT_TOOL, **extra}]}),
        {"type", "name", "description", "parameters", "strict"},
    ),
    "a response's choice": (
        answers.ToolChoiceFunctionParam,
        lambda extra: response_order(
            {"model": "m", "input": "x", "tool_choice": {"type": "function", "name": "look", **extra}}
        ),
        {"type", "name"},
    ),
    "a response's part": (
        answers.ResponseInputTextParam,
        lambda extra: of_items(SAID)({"content": [{"type": "input_text", "text": "x", **extra}]}),
        {"type", "text"},
    ),
    "an item of a message": (
        answers.EasyInputMessageParam,
        of_items({"type": "message", **SAID}),
        {"type", "role", "content"},
    ),
    "an item of a call": (
        answers.ResponseFunctionToolCallParam,
        of_items(FLAT_CALL),
        {"type", "call_id", "name", "arguments", "id", "status"},
    ),
    "an item of what a call gave": (
        FunctionCallOutput,
        lambda extra: response_order({"model": "m", "input": [SAID, FLAT_CALL, {**OUTPUT, **extra}]}),
        {"type", "call_id", "output", "id", "status"},
    ),
    "an item that was answered": (
        answers.ResponseOutputMessageParam,
        of_items({"type": "message", "role": "assistant", "content": "x"}),
        {"type", "role", "content", "id", "status"},
    ),
    "a part that was answered": (
        answers.ResponseOutputTextParam,
        lambda extra: of_items({"type": "message", "role": "assistant"})(
            {"content": [{"type": "output_text", "text": "x", **extra}]}
        ),
        {"type", "text"},
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_no_member_inside_is_ignored(name: str) -> None:
    """Every other member of the official type, and any other, is refused by its name, or told as taken."""
    official, read, known = INSIDE[name]
    members = set(typing.get_type_hints(official))
    assert known <= members
    usual: Any = {"format": {"type": "text"}} if name == "a response's text" else {}
    assert read(usual).check_hints(()) == ()
    for member in sorted(members - known | {"colour", "metadata", "traceId"}):
        for empty in (None, "", [], {}):
            assert read({**usual, member: empty}).check_hints(()) == ()
        told = _told(read, {**usual, member: JUNK})
        assert told
        assert all(member in place.split(".") for place in told)


def _told(read: Callable[[Any], Any], extra: Any) -> tuple[str, ...]:
    """What is taken, or refused."""
    try:
        return tuple(read(extra).check_hints(()))
    except InvalidArgumentError as error:
        return (error.metadata["field"],)
