"""Turns of a request as tokens, behind what they follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decode_engine.rpc.prompts.stored_messages import StoredMessages
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Conversation, Message, Tool, parse_object, refused
from index_store.models.tokenizer import Tokenizer


def untold(tokenizer: Tokenizer, tools: Sequence[Tool]) -> bool:
    """Whether there are tools, and a model that cannot be told of them."""
    return bool(tools) and (tokenizer.call_syntax is None or not tokenizer.call_syntax.told)


def turn_tokens(
    turns: Sequence[Message], tools: Sequence[Tool], tokenizer: Tokenizer, stored: StoredMessages
) -> list[int]:
    """Tokens of turns after a context. tools: of the request.

    Raises InvalidArgumentError for turns and tools that cannot follow it.
    """
    before = stored.conversation()
    known = () if before is None else before.conversation.tools
    told = () if untold(tokenizer, tools) else tuple(tools)
    if before is None:
        if told:
            raise refused(
                "tools",
                "tools, and the context was made with no tools",
                "a context of messages and these tools: the model is told of them at the beginning",
            )
        return tokenizer.encode_turns(turns)
    if told and not _same(told, known):
        before = replace(before, conversation=replace(before.conversation, tools=told))
        try:
            return tokenizer.continue_conversation(before, turns, stored.tokens)
        except InvalidArgumentError as error:
            if "position" not in error.metadata:
                raise
            made = "other tools" if known else "no tools"
            raise refused(
                "tools",
                f"tools, and the context was made with {made}",
                "the same, or a context of messages and these tools: the model is told of them at the beginning",
            ) from None
    return tokenizer.continue_conversation(before, turns, stored.tokens)


def _same(tools: Sequence[Tool], others: Sequence[Tool]) -> bool:
    """Whether they mean the same, however their schemas are written."""

    def meant(tool: Tool) -> tuple[object, ...]:
        return tool.name, tool.description, parse_object("tools", tool.parameters)

    return [meant(tool) for tool in tools] == [meant(tool) for tool in others]


def conversation_tokens(turns: Sequence[Message], tools: Sequence[Tool], tokenizer: Tokenizer) -> list[int]:
    """Tokens of a conversation from its beginning, up to where the answer begins. Raises InvalidArgumentError."""
    told = () if untold(tokenizer, tools) else tuple(tools)
    return tokenizer.encode_conversation(Conversation(tuple(turns), told), answer_follows=True)
