"""Tokens are counted over HTTP as the model counts them, under the names that clients call."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from decode_engine.rpc.client import Client
from index_store.models.conversation.messages import Conversation, Message, Role
from tests.decode_engine.conftest import MAX_POSITIONS

SAID: Any = {"role": "user", "content": [{"type": "text", "text": "Who?"}, {"type": "text", "text": " Me."}]}


def test_texts_and_conversations_are_cut(web: httpx.Client, client: Client) -> None:
    text = client.tokenize("Who? \u00e9")
    told = web.post(
        "/tokenize", json={"prompt": "Who? \u00e9", "model": "model", "return_token_strs": True}
    ).json()
    assert (told["count"], told["tokens"]) == (len(text.ids), list(text.ids))
    assert told["max_model_len"] == MAX_POSITIONS
    assert "".join(told["token_strs"][:4]) == "Who?"
    assert web.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "Who? \u00e9"}
    turns = web.post("/tokenize", json={"messages": [SAID], "add_generation_prompt": True})
    spoken = client.tokenize(Conversation((Message(Role.USER, "Who? Me."),)))
    assert (turns.json()["tokens"], turns.json()["token_strs"]) == (list(spoken.ids), None)


def test_what_a_response_begins_with_is_counted(official: openai.OpenAI, client: Client) -> None:
    counted = official.responses.input_tokens.count(model="model", instructions="Be brief.", input=[SAID])
    turns = (Message(Role.SYSTEM, "Be brief."), Message(Role.USER, "Who? Me."))
    assert counted.input_tokens == client.count_tokens(Conversation(turns))
    assert counted.object == "response.input_tokens"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [SAID]}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "ids"),
        ("/v1/responses/input_tokens", {"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ("/v1/responses/input_tokens", {"input": "x", "colour": 1}, "colour"),
    ],
)
def test_wrong_values_are_named(web: httpx.Client, path: str, body: Any, param: str) -> None:
    reply = web.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_a_model_tells_how_much_it_reads(web: httpx.Client) -> None:
    (listed,) = web.get("/v1/models").json()["data"]
    assert listed["max_model_len"] == listed["context_length"] == MAX_POSITIONS
