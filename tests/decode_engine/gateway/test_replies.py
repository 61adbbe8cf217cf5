"""Replies are what OpenAI's own client takes them for: whole, in streams, and as errors."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from decode_engine.rpc.client import Client
from index_store.models.conversation.messages import Conversation, Message, Role
from tests.decode_engine.conftest import MAX_POSITIONS

ASK: Any = {
    "model": "model",
    "messages": [{"role": "user", "content": "Who lit the lamp?"}],
    "temperature": 0,
    "max_tokens": 6,
    "extra_body": {"context": "lamp"},
}


def valid(kind: Any, value: Any) -> Any:
    """The value as the official type reads it when it is strict about what it has to be."""
    return TypeAdapter(kind).validate_python(value.model_dump(warnings="error"))


@pytest.fixture
def answer(client: Client, lamp: str) -> str:
    """What the server itself says."""
    with client.generate(lamp, question="Who lit the lamp?", max_tokens=6) as generation:
        return generation.read()


@pytest.fixture
def tokens(client: Client, lamp: str) -> int:
    return client.get_context(lamp).token_count


def test_chat(official: openai.OpenAI, answer: str, tokens: int) -> None:
    reply = valid(ChatCompletion, official.chat.completions.create(**ASK))
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        answer,
        "length",
    )
    assert reply.model == "model"
    assert reply.usage.prompt_tokens_details.cached_tokens == tokens
    assert reply.usage.completion_tokens == 6
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 6
    assert reply.usage.prompt_tokens > tokens


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


@pytest.mark.parametrize("with_usage", [False, True])
def test_chat_in_a_stream(official: openai.OpenAI, answer: str, tokens: int, with_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    chunks = [
        valid(ChatCompletionChunk, chunk)
        for chunk in official.chat.completions.create(**ASK, stream=True, **options)
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    last = chunks.pop() if with_usage else None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    if last is not None:
        assert last.choices == []
        assert last.usage.prompt_tokens_details.cached_tokens == tokens


def test_completions(official: openai.OpenAI, client: Client, lamp: str) -> None:
    with client.generate(lamp, text=" The keeper", max_tokens=16) as generation:
        expected = generation.read()
    ask: Any = {
        "model": "model",
        "prompt": " The keeper",
        "temperature": 0,
        "extra_body": {"context": "lamp"},
    }
    reply = valid(Completion, official.completions.create(**ask))
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (expected, "length")
    chunks = [valid(Completion, chunk) for chunk in _chunks(official.completions.create(**ask, stream=True))]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    ask["prompt"] = [5, 6, 7]
    assert official.completions.create(**ask).usage.completion_tokens == 16


def _chunks(stream: Any) -> list[Any]:
    """Chunks of completions, of which OpenAI's type asks for a reason why they ended although not all have."""
    found = list(stream)
    for chunk in found[:-1]:
        assert chunk.choices[0].finish_reason is None
        chunk.choices[0].finish_reason = "stop"
    return found


def test_responses(official: openai.OpenAI, answer: str, tokens: int) -> None:
    ask: Any = {
        "model": "model",
        "input": "Who lit the lamp?",
        "temperature": 0,
        "max_output_tokens": 6,
        "extra_body": {"context": "lamp"},
    }
    reply = valid(Response, official.responses.create(**ask))
    assert reply.output_text == answer
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.usage.input_tokens_details.cached_tokens == tokens
    events = list(official.responses.create(**ask, stream=True))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == answer


def test_models(official: openai.OpenAI) -> None:
    (listed,) = official.models.list().data
    assert valid(Model, listed).id == "model"
    assert official.models.retrieve("model").id == "model"
    with pytest.raises(openai.NotFoundError, match="'model' is served"):
        official.models.retrieve("gpt")


@pytest.mark.parametrize(
    ("changes", "kind", "param", "code"),
    [
        ({"extra_body": {"context": "nowhere"}}, openai.NotFoundError, "context", "context_not_found"),
        ({"model": "gpt"}, openai.NotFoundError, None, "model_not_found"),
        ({"n": 2}, openai.BadRequestError, "n", "invalid_argument"),
        ({"messages": []}, openai.BadRequestError, "messages", "invalid_argument"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(
    official: openai.OpenAI, lamp: str, changes: Any, kind: Any, param: str | None, code: str, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        official.chat.completions.create(**{**ASK, **changes}, stream=stream)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert caught.value.body["message"]


SAID: Any = {"role": "user", "content": [{"type": "text", "text": "Who?"}, {"type": "text", "text": " Me."}]}


def test_what_a_response_begins_with_is_counted(official: openai.OpenAI, client: Client) -> None:
    counted = official.responses.input_tokens.count(model="model", instructions="Be brief.", input=[SAID])
    turns = (Message(Role.SYSTEM, "Be brief."), Message(Role.USER, "Who? Me."))
    assert counted.input_tokens == client.count_tokens(Conversation(turns))
    assert counted.object == "response.input_tokens"


def test_a_model_tells_how_much_it_reads(web: httpx.Client) -> None:
    (listed,) = web.get("/v1/models").json()["data"]
    assert listed["max_model_len"] == listed["context_length"] == MAX_POSITIONS
