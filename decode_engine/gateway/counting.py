"""Texts and conversations as tokens, under the names by which vLLM and OpenAI have them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from decode_engine.gateway.exchange import ask, exchange_of, read_given
from decode_engine.gateway.wire.bodies import rename_parts, response_turns
from decode_engine.gateway.wire.endpoints import RESPONSES, TEMPLATE
from decode_engine.gateway.wire.messages_shape import MESSAGE, turns_of
from decode_engine.gateway.wire.parameters import (
    MESSAGES,
    TOOLS,
    Endpoint,
    Parameter,
    refused,
    taken,
)
from decode_engine.gateway.wire.sent_events import JsonReply
from decode_engine.gateway.wire.tool_shapes import TOOL, tools_of
from decode_engine.orders.kinds import FLAG, TEXT, TOKENS
from decode_engine.rpc.client import verbs
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Conversation

_COUNTED = frozenset(
    (
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "text",
        "reasoning",
        "truncation",
        "previous_response_id",
        "conversation",
    )
)
INPUT_TOKENS = Endpoint(
    "/v1/responses/input_tokens",
    (
        *(one for one in RESPONSES.parameters if one.name in _COUNTED),
        *taken("model", "one model is served"),
    ),
)
TOKENIZE = Endpoint(
    "/tokenize",
    (
        Parameter("prompt", TEXT, "A text. Exactly one of `prompt` and `messages`."),
        Parameter("messages", MESSAGES, "A conversation from its beginning.", inside=MESSAGE),
        Parameter("tools", TOOLS, "With `messages`: functions that the model is told of.", inside=TOOL),
        *taken("model", "one model is served"),
        refused("add_special_tokens", "a template says them all; of a text the tokens of its words are told"),
        Parameter("return_token_strs", FLAG, "Whether the tokens' texts are told, too."),
        *(each for each in TEMPLATE if each.name != "add_special_tokens"),
    ),
)
DETOKENIZE = Endpoint(
    "/detokenize",
    (Parameter("tokens", TOKENS, "The tokens.", required=True), *taken("model", "one model is served")),
)


async def tokenize(request: Request) -> Response:
    """POST /tokenize: tokens of a text, or of a conversation up to where the answer begins."""
    given = await read_given(request, TOKENIZE)
    if ("prompt" in given) == ("messages" in given):
        raise InvalidArgumentError("give exactly one of prompt and messages", field="prompt")
    said: str | Conversation = given.get("prompt", "")
    if "messages" in given:
        said = Conversation(turns_of(given["messages"]), tools_of(given.get("tools", [])))
    found = await ask(request, verbs.tokenize(said))
    texts = [text.decode("utf-8", "replace") for text in found.texts]
    return JsonReply(
        {
            "count": len(found.ids),
            "max_model_len": exchange_of(request).beside.served.answering.facts.identity.max_positions,
            "tokens": found.ids,
            "token_strs": texts if given.get("return_token_strs") else None,
        }
    )


async def detokenize(request: Request) -> Response:
    """POST /detokenize: the text of tokens."""
    given = await read_given(request, DETOKENIZE)
    return JsonReply({"prompt": await ask(request, verbs.detokenize(given["tokens"]))})


async def count_input(request: Request) -> Response:
    """POST /v1/responses/input_tokens: how many tokens a response would begin with, without a context."""
    given = await read_given(request, INPUT_TOKENS)
    turns, places = response_turns(given)
    said = Conversation(turns, tools_of(given.get("tools", [])))
    try:
        counted = await ask(request, verbs.count_tokens(said))
    except InvalidArgumentError as error:
        rename_parts(error, places)
        raise
    return JsonReply({"object": "response.input_tokens", "input_tokens": counted})
