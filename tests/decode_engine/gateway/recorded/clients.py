"""Clients that people have, each as it is used: one face over them for the tests that all of them take.

Each is imported where it is asked first: all of them take seconds in every process that collects tests.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import openai
import pytest
from pydantic import BaseModel, SecretStr

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its prices are nobody's here, and it would ask for them

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
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
Said = list[tuple[str, str]]


def schema(parameters: Any) -> Any:
    """The response format of answers that are JSON of these parameters."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": parameters, "strict": True}}


class Talks(Protocol):
    """What each can do, over a context or none. said: roles and texts; options: as OpenAI's API has them."""

    def ask(self, said: Said, context: str | None = "notes", **options: Any) -> str: ...

    def stream(self, said: Said, context: str | None = "notes", **options: Any) -> str: ...

    def call(self, said: Said, context: str | None = "notes") -> tuple[str, Any]: ...

    def refusal(self, said: Said, **options: Any) -> str: ...


def _dicts(said: Said) -> Any:
    return [{"role": role, "content": text} for role, text in said]


def _extra(context: str | None) -> dict[str, Any]:
    """What openai's package and those over it take beside OpenAI's own parameters."""
    return {"extra_body": {"context": context}} if context else {}


def _refused(ask: Any, said: Said, **options: Any) -> str:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(said, **options)
    return str(caught.value.message)


_CALLING: Any = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}


@dataclass(frozen=True)
class Official:
    url: str

    def _create(self, said: Said, context: str | None = "notes", **options: Any) -> Any:
        client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)
        given = {"max_tokens": 24, "temperature": 0, "user": "me", **_extra(context), **options}
        return client.chat.completions.create(model="reader", messages=_dicts(said), **given)

    def ask(self, said: Said, context: str | None = "notes", **options: Any) -> str:
        return str(self._create(said, context, **options).choices[0].message.content)

    def stream(self, said: Said, context: str | None = "notes", **options: Any) -> str:
        chunks = self._create(said, context, stream=True, **options)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def call(self, said: Said, context: str | None = "notes") -> tuple[str, Any]:
        reply = self._create(said, context, tools=[TOOL], **_CALLING)
        (call,) = reply.choices[0].message.tool_calls
        return call.function.name, json.loads(call.function.arguments)

    def refusal(self, said: Said, **options: Any) -> str:
        return _refused(self._create, said, **options)


@dataclass(frozen=True)
class LangChain:
    url: str

    def _chat(self, context: str | None, **options: Any) -> Any:
        from langchain_openai import ChatOpenAI

        given: Any = {"temperature": 0, "max_tokens": 24, "max_retries": 0, **_extra(context)}
        if "response_format" in options:
            given["model_kwargs"] = {"response_format": options.pop("response_format")}
        key = SecretStr("none")
        return ChatOpenAI(base_url=self.url, api_key=key, model="reader", **{**given, **options})

    def _messages(self, said: Said) -> list[Any]:
        from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

        kinds = {SYSTEM: SystemMessage, USER: HumanMessage, ASSISTANT: AIMessage}
        return [kinds[role](text) for role, text in said]

    def ask(self, said: Said, context: str | None = "notes", **options: Any) -> str:
        return str(self._chat(context, **options).invoke(self._messages(said)).content)

    def stream(self, said: Said, context: str | None = "notes", **options: Any) -> str:
        pieces = self._chat(context, **options).stream(self._messages(said))
        return "".join(str(piece.content) for piece in pieces)

    def call(self, said: Said, context: str | None = "notes") -> tuple[str, Any]:
        chat = self._chat(context, max_tokens=200)
        bound = chat.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
        (call,) = bound.invoke(self._messages(said)).tool_calls
        return call["name"], call["args"]

    def refusal(self, said: Said, **options: Any) -> str:
        return _refused(self.ask, said, **options)


@dataclass(frozen=True)
class LiteLLM:
    url: str

    def _complete(self, said: Said, context: str | None = "notes", **options: Any) -> Any:
        import litellm

        given = {"max_tokens": 24, "temperature": 0, "metadata": {"a": "b"}, **_extra(context)}
        at = {"model": "openai/reader", "api_base": self.url, "api_key": "none", "max_retries": 0}
        return litellm.completion(messages=_dicts(said), **at, **{**given, **options})

    def ask(self, said: Said, context: str | None = "notes", **options: Any) -> str:
        return str(self._complete(said, context, **options).choices[0].message.content)

    def stream(self, said: Said, context: str | None = "notes", **options: Any) -> str:
        chunks = self._complete(said, context, stream=True, **options)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def call(self, said: Said, context: str | None = "notes") -> tuple[str, Any]:
        reply = self._complete(said, context, tools=[TOOL], **_CALLING)
        (call,) = reply.choices[0].message.tool_calls
        return call.function.name, json.loads(call.function.arguments)

    def refusal(self, said: Said, **options: Any) -> str:
        return _refused(self._complete, said, **options)


class Noted(BaseModel):
    mood: Literal["calm", "stormy"]


def note_down(mood: str) -> str:
    """Notes."""
    return mood


@dataclass(frozen=True)
class LlamaIndex:
    url: str

    def _llm(self, context: str | None, **options: Any) -> Any:
        from llama_index.llms.openai_like import OpenAILike

        return OpenAILike(
            model="reader",
            api_base=self.url,
            api_key="none",
            max_retries=0,
            is_chat_model=True,
            is_function_calling_model=True,
            temperature=0,
            max_tokens=24,
            additional_kwargs={**_extra(context), **options},  # these count before its own
        )

    def _messages(self, said: Said) -> list[Any]:
        from llama_index.core.base.llms.types import ChatMessage

        return [ChatMessage(role=role, content=text) for role, text in said]

    def ask(self, said: Said, context: str | None = "notes", **options: Any) -> str:
        return str(self._llm(context, **options).chat(self._messages(said)).message.content)

    def stream(self, said: Said, context: str | None = "notes", **options: Any) -> str:
        pieces = self._llm(context, **options).stream_chat(self._messages(said))
        return "".join(piece.delta or "" for piece in pieces)

    def call(self, said: Said, context: str | None = "notes") -> tuple[str, Any]:
        from llama_index.core.tools import FunctionTool

        llm = self._llm(context, max_tokens=200)
        tool = FunctionTool.from_defaults(note_down, fn_schema=Noted)
        reply = llm.chat_with_tools([tool], chat_history=self._messages(said), tool_required=True)
        (call,) = llm.get_tool_calls_from_response(reply)
        return call.tool_name, call.tool_kwargs

    def refusal(self, said: Said, **options: Any) -> str:
        return _refused(self.ask, said, **options)


CLIENTS = (Official, LangChain, LiteLLM, LlamaIndex)
