"""Tokens are counted over HTTP as the model counts them, under the names that clients call."""

from __future__ import annotations

from typing import Any

import httpx
import openai

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


def test_a_model_tells_how_much_it_reads(web: httpx.Client) -> None:
    (listed,) = web.get("/v1/models").json()["data"]
    assert listed["max_model_len"] == listed["context_length"] == MAX_POSITIONS
