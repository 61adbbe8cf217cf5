"""What a request may ask for: several answers, log probabilities, JSON; and that nothing is ignored."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from decode_engine.gateway.wire.bodies import CHAT, COMPLETIONS, RESPONSES
from decode_engine.gateway.wire.parameters import Endpoint
from decode_engine.rpc.client import Client
from index_store.models.conversation.messages import Message, Role
from index_store.store.catalog import Store
from tests.decode_engine.conftest import MAX_POSITIONS, Library
from tests.decode_engine.gateway.test_replies import ASK, valid


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES], ids=lambda endpoint: endpoint.path)
def test_what_changes_nothing_is_taken_and_told(
    endpoint: Endpoint, stream: bool, web: httpx.Client, lamp: str
) -> None:
    body: dict[str, Any] = {"model": "model", "context": "lamp", "temperature": 0, "stream": stream}
    body |= {
        CHAT.path: {"messages": [{**ASK["messages"][0], "id": "m1"}], "max_tokens": 6},
        COMPLETIONS.path: {"prompt": ["x"], "max_tokens": 6},
        RESPONSES.path: {"input": [{**ASK["messages"][0], "id": "m1"}], "max_output_tokens": 6},
    }[endpoint.path]
    inside = {CHAT.path: ["messages.id"], COMPLETIONS.path: [], RESPONSES.path: ["input.id"]}[endpoint.path]
    labels = {"user": "me", "store": True, "metadata": {"a": "b"}, "prompt_cache_key": "k", "traceId": "t"}
    reply = web.post(endpoint.path, json={**body, **labels})
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-sparsekv-taken"].split(", ")) == {*labels, *inside}


def test_several_answers(official: openai.OpenAI, lamp: str) -> None:
    ask = {**ASK, "temperature": 1, "seed": 5, "n": 3, "logprobs": True, "top_logprobs": 2}
    reply = valid(ChatCompletion, official.chat.completions.create(**ask))
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) > 1
    assert reply.usage.completion_tokens == 18
    texts: dict[int, str] = {}
    told: dict[int, list[Any]] = {}
    for chunk in official.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            told.setdefault(choice.index, []).extend(choice.logprobs.content if choice.logprobs else [])
    assert texts == {choice.index: choice.message.content for choice in reply.choices}
    for choice in reply.choices:
        tokens = choice.logprobs.content
        assert len(tokens) == len(told[choice.index]) == 6
        told_bytes = bytes(byte for token in tokens for byte in token.bytes)
        assert told_bytes.decode("utf-8", "ignore") == choice.message.content.replace("\ufffd", "")
        assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)


SCHEMA = {
    "type": "object",
    "properties": {"lit": {"type": "boolean"}},
    "required": ["lit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_what_its_schema_says(official: openai.OpenAI, lamp: str, stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": SCHEMA, "strict": True}}
    ask = {**ASK, "max_tokens": 200, "response_format": wanted}
    reply = official.chat.completions.create(**ask, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
    else:
        assert reply.choices[0].finish_reason == "stop"
        text = reply.choices[0].message.content
    assert set(json.loads(text)) == {"lit"}


def test_turns_are_sent_as_they_are(official: openai.OpenAI, client: Client, lamp: str) -> None:
    said = [("user", "Who lit the lamp?"), ("assistant", "The keeper."), ("user", "Why?")]
    turns = [Message(Role(role), text) for role, text in said]
    with client.generate(lamp, messages=turns, max_tokens=6) as generation:
        expected = generation.read()
    messages: Any = [{"role": role, "content": text} for role, text in said]
    reply = official.chat.completions.create(**{**ASK, "messages": messages})
    assert reply.choices[0].message.content == expected
    messages[1] |= {"refusal": None, "tool_calls": None, "annotations": []}  # as a reply has it
    messages[2]["content"] = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    assert official.chat.completions.create(**{**ASK, "messages": messages}).choices == reply.choices
    answered = official.responses.create(
        model="model", input=messages, max_output_tokens=6, temperature=0, extra_body={"context": "lamp"}
    )
    assert answered.output_text == expected


def test_several_prompts_are_answered_as_each_by_itself(web: httpx.Client, lamp: str) -> None:
    ask: Any = {"model": "model", "context": "lamp", "max_tokens": 5, "temperature": 0}

    def reply(**more: Any) -> Any:
        return web.post("/v1/completions", json={**ask, **more}).json()

    prompts = ["Who?", "Why did it rain?", "When?"]
    alone = [reply(prompt=prompt) for prompt in prompts]
    together = reply(prompt=prompts)
    texts = [(index, one["choices"][0]["text"]) for index, one in enumerate(alone)]
    assert [(choice["index"], choice["text"]) for choice in together["choices"]] == texts
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][name] == sum(one["usage"][name] for one in alone)
    tokens = [web.post("/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in prompts]
    assert reply(prompt=tokens)["choices"] == together["choices"]
    drawn = {"n": 2, "temperature": 1, "seed": 5, "prompt": prompts}
    whole = {choice["index"]: choice["text"] for choice in reply(**drawn)["choices"]}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = dict.fromkeys(range(6), "")
    used = None
    for line in web.post("/v1/completions", json={**ask, **drawn, **options}).text.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            used = chunk["usage"] or used
            for choice in chunk["choices"]:
                streamed[choice["index"]] += choice["text"]
    assert streamed == whole
    assert used["prompt_tokens"] == together["usage"]["prompt_tokens"]
    for wrong in (["x"] * 129, ["x", 5], ["x", ""]):
        assert reply(prompt=wrong)["error"]["param"] == "prompt"
    assert "shorten" in reply(prompt=["x", "y " * MAX_POSITIONS])["error"]["message"]
    assert reply(prompt=["x", "y"], keep={})["error"]["param"] == "keep"


def test_a_context_of_another_model_says_what_is_served(
    web: httpx.Client, library: Library, tmp_path: Path
) -> None:
    other = shutil.copytree(library.model, tmp_path / "other")
    id_ = replace(library, model=other).prefill("foreign", text="It hailed. " * 20)
    reply = web.post(
        "/v1/completions", json={"model": "model", "prompt": "x", "context": id_, "max_tokens": 1}
    )
    Store(library.store).delete(id_)
    assert reply.status_code == 404
    assert "this server serves 'model': serve 'other' for this context" in reply.json()["error"]["message"]
