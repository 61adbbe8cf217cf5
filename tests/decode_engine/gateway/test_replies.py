"""Replies are what OpenAI's own client takes them for: those that pins record, whole and in streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from decode_engine.rpc.client import Client
from index_store.models.conversation.messages import Message, Role
from tests.decode_engine.pins.recording import Case, read_cases

ASK: Any = {
    "model": "model",
    "messages": [{"role": "user", "content": "Who lit the lamp?"}],
    "temperature": 0,
    "max_tokens": 6,
    "extra_body": {"context": "lamp"},
}
KINDS: dict[str, tuple[Any, Any]] = {
    "POST /v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "POST /v1/completions": (Completion, Completion),
    "POST /v1/responses": (Response, ResponseStreamEvent),
    "GET /v1/models/model": (Model, None),
}
"""Types of whole replies, and of a stream's events."""
RECORDED = Path(__file__).parents[1] / "pins" / "recorded"
TAKEN = [
    pytest.param(case, id=f"{file.parent.name} {file.stem} {case.name}")
    for file in sorted(RECORDED.glob("*/*.jsonl"))
    for case in read_cases(file)
    if case.request.get("http") in KINDS and case.reply[0]["status"] == 200
]


def valid(kind: Any, value: Any) -> Any:
    """The value as the official type reads it when it is strict about what it has to be."""
    return TypeAdapter(kind).validate_python(value.model_dump(warnings="error"))


@pytest.mark.parametrize("case", TAKEN)
def test_what_is_recorded_is_what_the_official_types_say(case: Case) -> None:
    whole, event = KINDS[case.request["http"]]
    _, *lines = json.loads(json.dumps(case.reply).replace('"<time>"', "1"))
    for number, line in enumerate(lines):
        if "body" in line:
            TypeAdapter(whole).validate_python(line["body"], strict=True)
        elif line["data"] != "[DONE]":
            data = line["data"]
            if event is Completion:  # which wants a reason why it ended, though not all chunks have one
                data["choices"] = [{**each, "finish_reason": "stop"} for each in data["choices"]]
            if event is ResponseStreamEvent:
                data["sequence_number"] = number
            TypeAdapter(event).validate_python(data, strict=True)


def test_every_endpoint_explains_an_answer_where_that_is_wanted(official: openai.OpenAI, lamp: str) -> None:
    more = {"extra_body": {"context": "lamp", "explain": True}}
    whole = official.chat.completions.create(**(ASK | more))
    *_, last = official.chat.completions.create(**(ASK | more), stream=True)
    text = official.completions.create(model="model", prompt="Who?", max_tokens=2, **more)
    response = official.responses.create(model="model", input="Who?", max_output_tokens=2, **more)
    for reply in (whole, last, text, response):
        why = reply.model_extra["sparsekv"]["explanation"]
        assert (why["lookup"], why["context"]) == ("named", lamp.removeprefix("contexts/"))
        assert why["method_reason"]
        assert 0 < why["decode_ms"] < reply.model_extra["sparsekv"]["total_ms"]
    plain = official.chat.completions.create(**ASK)
    assert "explanation" not in plain.model_extra["sparsekv"]


def test_turns_are_sent_as_they_are(official: openai.OpenAI, client: Client, lamp: str) -> None:
    said = [("user", "Who lit the lamp?"), ("assistant", "The keeper."), ("user", "Why?")]
    turns = [Message(Role(role), text) for role, text in said]
    with client.generate(lamp, messages=turns, max_tokens=6) as generation:
        expected = generation.read()
    messages: Any = [{"role": role, "content": text} for role, text in said]
    reply = valid(ChatCompletion, official.chat.completions.create(**{**ASK, "messages": messages}))
    assert reply.choices[0].message.content == expected
    messages[1] |= {"refusal": None, "tool_calls": None, "annotations": []}  # as a reply has it
    messages[2]["content"] = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    assert official.chat.completions.create(**{**ASK, "messages": messages}).choices == reply.choices
    answered = official.responses.create(
        model="model", input=messages, max_output_tokens=6, temperature=0, extra_body={"context": "lamp"}
    )
    assert answered.output_text == expected
