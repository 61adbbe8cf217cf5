"""What a request says to a model, as tokens: messages, tools and texts, behind what is stored; and their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from decode_engine.engine.sampling.call_grammar import call_constraint
from decode_engine.errors import PromptTooLongError
from decode_engine.orders.order import Constraint, Order, ToolChoice
from decode_engine.settings.request_bounds import MAX_CONSTRAINT_BYTES, MAX_PROMPT_LOGPROBS
from index_store.errors import InvalidArgumentError
from index_store.family.parents import parent_of
from index_store.models.conversation.call_syntax import CallReader, CallSyntax
from index_store.models.conversation.messages import (
    Conversation,
    Message,
    Role,
    Tool,
    ToolCall,
    parse_object,
    refused,
)
from index_store.models.conversation.turns import StoredConversation
from index_store.models.tokenizer import Tokenizer
from index_store.store.catalog import Store
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.manifest import Manifest
from sparsekv.v1 import conversation_pb2


def parse_messages(message: conversation_pb2.Conversation) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Its messages and tools. Whether they can be said is checked with what they follow."""
    return (
        tuple(_parse_message(number, item) for number, item in enumerate(message.messages)),
        tuple(Tool(tool.name, tool.description, tool.parameters_json, tool.strict) for tool in message.tools),
    )


def _parse_message(number: int, message: conversation_pb2.Message) -> Message:
    roles = conversation_pb2.Message.Role
    if message.role == conversation_pb2.Message.ROLE_UNSPECIFIED or message.role not in roles.values():
        raise refused(f"messages[{number}].role", str(message.role), "one of SYSTEM, USER, ASSISTANT, TOOL")
    return Message(
        Role(roles.Name(message.role).lower()),
        message.content,
        message.name,
        tuple(ToolCall(call.name, call.arguments_json, call.id) for call in message.tool_calls),
        message.tool_call_id,
    )


@dataclass(frozen=True, slots=True)
class StoredMessages:
    """What a stored context was made of, read from the store when it is asked for."""

    store: Store
    manifest: Manifest

    def conversation(self) -> StoredConversation | None:
        """Its messages; None where it was made of a text or of tokens. Raises what reading a context raises."""
        if self.manifest.conversation is None:
            return None
        with self.store.files(self.manifest) as context:
            data = context.conversation()
        return StoredConversation.from_bytes(data or b"", f"context {self.manifest.id}")

    def tokens(self) -> Sequence[int]:
        """Its token ids, with those of the context that it continues. Raises ParentMissingError, too."""
        base = parent_of(self.store, self.manifest)
        ids: list[int] = []
        for manifest in (base, self.manifest):
            if manifest is not None:
                with self.store.files(manifest) as context:
                    ids += context.token_ids().tolist()
        return ids


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


_FIELD = "tool_choice"


@dataclass(frozen=True, slots=True)
class CallPlan:
    """How an answer of calls is made and read. constraint: that it obeys. shown: special tokens that its text has."""

    syntax: CallSyntax
    constraint: Constraint
    forced: bool
    shown: frozenset[int]

    def reader(self) -> CallReader:
        return CallReader(self.syntax, forced=self.forced)


def check_told(choice: ToolChoice, tokenizer: Tokenizer, name: str) -> CallSyntax:
    """How the model words the calls that are wanted. name: the model's.

    Raises InvalidArgumentError where it cannot be told of tools, or words calls in a way that is not understood.
    """
    syntax = tokenizer.call_syntax
    if syntax is None:
        raise refused(
            _FIELD,
            choice.mode.upper(),
            f"NONE: the chat template of model {name!r} words calls in a way that is not understood here, so that they "
            "are text",
        )
    if not syntax.told and choice.mode == "auto":
        raise refused(
            _FIELD,
            choice.mode.upper(),
            f"REQUIRED or NONE: the chat template of model {name!r} knows no tools, so that it would not know when to "
            "call one",
        )
    return syntax


def plan_calls(
    choice: ToolChoice, tools: Sequence[Tool], tokenizer: Tokenizer, name: str, answer: Constraint | None
) -> CallPlan | None:
    """How the calls that a request wants are made; None where it wants none. tools: that there are. answer: what a text
    without calls has to be.

    Raises InvalidArgumentError as `check_told` does, and for tools that cannot be called.
    """
    if choice.mode == "none" or (choice.mode == "auto" and not (tools or choice.names)):
        return None
    syntax = check_told(choice, tokenizer, name)
    known = [tool.name for tool in tools]
    unknown = ", ".join(ascii(name) for name in choice.names if name not in known)
    if unknown or not known:
        expected = f"one of {', '.join(known)}"[:300] if known else "tools in the request"
        raise refused(_FIELD, unknown or choice.mode.upper(), expected)
    named = tuple(tool for tool in tools if tool.name in choice.names or not choice.names)
    forced = choice.mode == "required"
    constraint = call_constraint(
        syntax,
        named,
        forced=forced,
        several=not choice.single,
        hidden=tokenizer.hidden,
        ends=tokenizer.eos_ids,
        answer=answer,
    )
    if len(constraint.text.encode()) > MAX_CONSTRAINT_BYTES:
        raise refused(
            "tools",
            f"schemas and names of {len(constraint.text.encode())} bytes",
            f"at most {MAX_CONSTRAINT_BYTES}; send fewer tools, or ones that are not strict",
        )
    written = "".join((syntax.open, syntax.middle, syntax.close, syntax.between or ""))
    shown = frozenset(id_ for text, id_ in tokenizer.hidden.items() if text in written)
    return CallPlan(syntax, constraint, forced, shown)


def whole_tokens(
    order: Order, tokenizer: Tokenizer, identity: ModelIdentity, check: Callable[[], None]
) -> list[int]:
    """All tokens of an order that names no context, as a document of them has them.

    check: called now and then while a long text is cut; what it raises ends that. Raises PromptTooLongError, before it
    has cost more than the model's positions are worth, for what they do not hold, and InvalidArgumentError.
    """
    if order.text is not None:
        check_document(tokenizer.at_least(order.text, identity.max_positions, check), identity)
        return [*tokenizer.prefix_ids, *tokenizer.encode(order.text)]
    if order.prompt:
        check_document(len(order.prompt), identity)
        check_tokens("token_ids", order.prompt, identity)
        return list(order.prompt)
    said = "\n".join(turn.content for turn in order.turns)
    check_document(tokenizer.at_least(said, identity.max_positions, check), identity)
    return conversation_tokens(order.turns, order.tools, tokenizer)


def prompt_tokens(
    order: Order,
    tokenizer: Tokenizer,
    identity: ModelIdentity,
    stored: StoredMessages,
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """The tokens behind a stored context. check, raises: as `whole_tokens`; for turns that cannot follow it, too."""
    text = "".join(turn.content for turn in order.turns) if order.text is None else order.text
    context = stored.manifest.token_count
    room = identity.max_positions - context
    least = len(order.prompt) or tokenizer.at_least(text, room, check)
    if least > room:
        raise PromptTooLongError(
            f"the prompt has at least {least} tokens, and after the context's {context} there is room for "
            f"{max(room, 0)} of the {identity.max_positions} positions of model {identity.name!r}; shorten the prompt",
            context_tokens=context,
            prompt_tokens=least,
            max_positions=identity.max_positions,
        )
    if order.turns:
        return turn_tokens(order.turns, order.tools, tokenizer, stored)
    return list(order.prompt) if order.text is None else tokenizer.encode_behind(order.text)


def check_document(least: int, identity: ModelIdentity) -> None:
    """Raises PromptTooLongError for what has at least so many tokens, where the model has no positions for them."""
    if least > identity.max_positions:
        raise PromptTooLongError(
            f"the text has at least {least} tokens, model {identity.name!r} has {identity.max_positions} positions; "
            "shorten it",
            prompt_tokens=least,
            max_positions=identity.max_positions,
        )


def check_prompt(order: Order, ids: Sequence[int], identity: ModelIdentity) -> None:
    """Raises InvalidArgumentError where a prompt has no tokens, one that the model has not, or too many to tell log
    probabilities of."""
    if not ids:
        raise InvalidArgumentError("the prompt has no tokens, expected at least one", field="prompt")
    check_tokens("token_ids", ids, identity)
    if order.prompt_logprobs and len(ids) > MAX_PROMPT_LOGPROBS:
        raise InvalidArgumentError(
            f"prompt_logprobs are wanted of {len(ids)} tokens, expected a prompt of at most {MAX_PROMPT_LOGPROBS}",
            field="prompt_logprobs",
        )


def check_named_tokens(order: Order, identity: ModelIdentity) -> None:
    """Raises InvalidArgumentError where the order names tokens, apart from the prompt's, that the model has not."""
    check_tokens("logit_bias", order.sampling.logit_bias, identity)
    check_tokens("stop_token_ids", order.stop_token_ids, identity)


def check_tokens(field: str, ids: Iterable[int], identity: ModelIdentity) -> None:
    """Raises InvalidArgumentError for a token that the model has not."""
    for found in (max(ids, default=0), min(ids, default=0)):
        if 0 <= found < identity.vocab_size:
            continue
        raise InvalidArgumentError(
            f"{field} contains {found}, expected ids of 0 to {identity.vocab_size - 1}", field=field
        )
