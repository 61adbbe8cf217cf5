"""Clients that people have, each as it is used, on one server of the packaged reader."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its prices are nobody's here, and it would ask for them
import litellm

from decode_engine.gateway.serving import Gateway
from decode_engine.rpc.server import DecodeServer
from decode_engine.settings.config import ServeConfig
from index_store.store.catalog import Store
from tests.decode_engine.gateway.test_tools import made

NOTES = "The harbour of Elm is grey. Its lamp is lit by the keeper Anna every evening. Ships come from Oslo. "
PARAMETERS: Any = {
    "type": "object",
    "properties": {"mood": {"enum": ["calm", "stormy"]}},
    "required": ["mood"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "note_down", "description": "Notes.", "parameters": PARAMETERS},
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "mood", "schema": PARAMETERS, "strict": True}}
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
Said = list[tuple[str, str]]


class Talks(Protocol):
    """What each of the clients can do. said: roles and texts; options: as OpenAI's API has them."""

    def ask(self, said: Said, **options: Any) -> str: ...

    def stream(self, said: Said, **options: Any) -> str: ...

    def call(self, said: Said) -> tuple[str, Any]: ...

    def refusal(self, said: Said, **options: Any) -> str: ...


def _dicts(said: Said) -> Any:
    return [{"role": role, "content": text} for role, text in said]


@dataclass(frozen=True)
class Official:
    url: str

    def _create(self, said: Said, **options: Any) -> Any:
        client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)
        given = {
            "max_tokens": 24,
            "temperature": 0,
            "user": "me",
            "extra_body": {"context": "notes"},
            **options,
        }
        return client.chat.completions.create(model="reader", messages=_dicts(said), **given)

    def ask(self, said: Said, **options: Any) -> str:
        return str(self._create(said, **options).choices[0].message.content)

    def stream(self, said: Said, **options: Any) -> str:
        chunks = self._create(said, stream=True, **options)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def call(self, said: Said) -> tuple[str, Any]:
        (call,) = (
            self._create(
                said, tools=[TOOL], tool_choice="required", max_tokens=200, parallel_tool_calls=False
            )
            .choices[0]
            .message.tool_calls
        )
        return call.function.name, json.loads(call.function.arguments)

    def refusal(self, said: Said, **options: Any) -> str:
        with pytest.raises(openai.APIStatusError) as caught:
            self._create(said, **options)
        return caught.value.message


@dataclass(frozen=True)
class LangChain:
    url: str

    def _chat(self, **options: Any) -> ChatOpenAI:
        given: Any = {
            "temperature": 0,
            "max_tokens": 24,
            "max_retries": 0,
            "extra_body": {"context": "notes"},
        }
        if "response_format" in options:
            given["model_kwargs"] = {"response_format": options.pop("response_format")}
        key = SecretStr("none")
        return ChatOpenAI(base_url=self.url, api_key=key, model="reader", **{**given, **options})  # type: ignore[arg-type]

    def _messages(self, said: Said) -> list[Any]:
        kinds = {SYSTEM: SystemMessage, USER: HumanMessage, ASSISTANT: AIMessage}
        return [kinds[role](text) for role, text in said]

    def ask(self, said: Said, **options: Any) -> str:
        return str(self._chat(**options).invoke(self._messages(said)).content)

    def stream(self, said: Said, **options: Any) -> str:
        return "".join(str(piece.content) for piece in self._chat(**options).stream(self._messages(said)))

    def call(self, said: Said) -> tuple[str, Any]:
        bound = self._chat(max_tokens=200).bind_tools(
            [TOOL], tool_choice="required", parallel_tool_calls=False
        )
        (call,) = bound.invoke(self._messages(said)).tool_calls
        return call["name"], call["args"]

    def refusal(self, said: Said, **options: Any) -> str:
        with pytest.raises(openai.APIStatusError) as caught:
            self._chat(**options).invoke(self._messages(said))
        return caught.value.message


@dataclass(frozen=True)
class LiteLLM:
    url: str

    def _complete(self, said: Said, **options: Any) -> Any:
        given = {
            "max_tokens": 24,
            "temperature": 0,
            "extra_body": {"context": "notes"},
            "metadata": {"a": "b"},
        }
        at = {"model": "openai/reader", "api_base": self.url, "api_key": "none", "max_retries": 0}
        return litellm.completion(messages=_dicts(said), **at, **{**given, **options})

    def ask(self, said: Said, **options: Any) -> str:
        return str(self._complete(said, **options).choices[0].message.content)

    def stream(self, said: Said, **options: Any) -> str:
        chunks = self._complete(said, stream=True, **options)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def call(self, said: Said) -> tuple[str, Any]:
        (call,) = (
            self._complete(
                said, tools=[TOOL], tool_choice="required", max_tokens=200, parallel_tool_calls=False
            )
            .choices[0]
            .message.tool_calls
        )
        return call.function.name, json.loads(call.function.arguments)

    def refusal(self, said: Said, **options: Any) -> str:
        with pytest.raises(openai.APIStatusError) as caught:
            self._complete(said, **options)
        return str(caught.value.message)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server of the packaged reader, with notes."""
    store = tmp_path_factory.mktemp("clients") / "store"
    Store(store, create=True)
    config = ServeConfig(
        store, "reader", listen="127.0.0.1:0", device="cpu", warm_up=False, prefill=True, method="context"
    )
    with DecodeServer(config) as server:
        server.load()
        with Gateway("127.0.0.1:0", server.address) as gateway:
            with httpx.Client(base_url=gateway.url, timeout=60) as web:
                made(web, text=NOTES * 4, display_name="notes")
            yield f"{gateway.url}/v1"


@pytest.fixture(params=[Official, LangChain, LiteLLM], ids=lambda kind: kind.__name__)
def client(request: pytest.FixtureRequest, url: str) -> Talks:
    made_client: Talks = request.param(url)
    return made_client


QUESTION = (USER, "Who lights the lamp of Elm?")


def test_a_question_a_stream_and_a_system(client: Talks) -> None:
    alone = client.ask([QUESTION], stop="\n")
    assert alone
    assert client.stream([QUESTION], stop="\n").strip() == alone.strip()
    told = [(SYSTEM, "You answer from notes."), (SYSTEM, "Be brief."), QUESTION]
    assert client.ask(told, stop="\n")
    assert client.stream(told, stop="\n").strip() == client.ask(told, stop="\n").strip()


def test_a_tool_and_a_schema(client: Talks) -> None:
    name, arguments = client.call([(SYSTEM, "You note things down."), (USER, "How is the sea?")])
    assert name == "note_down"
    assert arguments["mood"] in ("calm", "stormy")
    answer = json.loads(client.ask([(USER, "How is the sea?")], response_format=FORMAT, max_tokens=65535))
    assert answer["mood"] in ("calm", "stormy")


def test_three_turns_and_an_empty_answer(client: Talks) -> None:
    said: Said = [(SYSTEM, "You answer from notes.")]
    for question in ("Who lights the lamp of Elm?", "Where do ships come from?", "What is grey?"):
        said.append((USER, question))
        said.append((ASSISTANT, client.ask(said, stop="\n")))
    assert len(said) == 7
    assert client.ask([*said[:2], (ASSISTANT, ""), (USER, "Who?")], stop="\n") is not None


def test_errors_say_what_to_do(client: Talks) -> None:
    assert "nowhere" in client.refusal([QUESTION], extra_body={"context": "nowhere"})
    assert "colour" in client.refusal([QUESTION], extra_body={"context": "notes", "colour": 1})
    assert "expected" in client.refusal([QUESTION], temperature=-1)
