"""What requests contain, as values that are checked: of Generate by the table of fields."""

from __future__ import annotations

from typing import Any, cast

from decode_engine.orders.checking import check_order, constraint_of, stop_tokens
from decode_engine.orders.fields import FIELDS, split
from decode_engine.orders.order import CallMode, Constraint, KeepOptions, Order, ToolChoice
from decode_engine.rpc.contexts.names import parse_name
from decode_engine.rpc.prompts.turn_tokens import conversation_tokens
from decode_engine.rpc.prompts.wire_messages import parse_messages
from decode_engine.settings.request_bounds import MAX_BATCH
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import MAX_MESSAGES, Message, Role, refused
from index_store.models.tokenizer import Tokenizer
from sparsekv.v1 import conversation_pb2, generation_pb2

_FIELDS = tuple(
    (field, descriptor)
    for field in FIELDS
    if (descriptor := generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name.get(field.name)) is not None
)


def parse_order(request: generation_pb2.GenerateRequest) -> Order:
    """Checks all that can be checked without the context. Raises InvalidArgumentError and names the field."""
    order = Order(
        context=parse_name(request.context, "context") if request.context else "",
        **_prompt(request),
        **split(
            {
                field.name: value
                for field, descriptor in _FIELDS
                if (value := _value(request, field.zero, descriptor)) is not None
            }
        ),
        constraint=_constraint(request) if request.HasField("constraint") else None,
        choice=_tool_choice(request),
        keep=_keep(request) if request.HasField("keep") else None,
    )
    check_order(order)
    return order


def _value(request: generation_pb2.GenerateRequest, zero: bool, descriptor: Any) -> Any:
    """A field's value as an order has it; None where it says nothing."""
    name = descriptor.name
    if descriptor.has_presence:
        return getattr(request, name) if request.HasField(name) else None
    value = getattr(request, name)
    if descriptor.message_type is not None:  # a map
        return dict(value) or None
    if descriptor.is_repeated:
        return (tuple if descriptor.type == descriptor.TYPE_STRING else stop_tokens)(value) or None
    return None if zero and not value else value


def _prompt(request: generation_pb2.GenerateRequest) -> dict[str, Any]:
    given = request.WhichOneof("prompt")
    if given is None:
        raise InvalidArgumentError(
            "the prompt is missing, expected one of text, token_ids, question, messages", field="prompt"
        )
    if given == "messages":
        count = len(request.messages.messages)
        if not 1 <= count <= MAX_MESSAGES:
            raise refused("messages", f"{count} messages", f"1 to {MAX_MESSAGES}")
        turns, tools = parse_messages(request.messages)
        return {"turns": turns, "tools": tools}
    content: Any = request.token_ids.ids if given == "token_ids" else getattr(request, given)
    if given == "question":
        if not content.strip():
            raise InvalidArgumentError("the question is blank, expected words", field=given)
        return {"turns": (Message(Role.USER, content),)}
    # Token ids are not copied: there may be millions, which the model has no positions for.
    return {"text" if given == "text" else "prompt": content}


def _constraint(request: generation_pb2.GenerateRequest) -> Constraint:
    kind = request.constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidArgumentError(
            "constraint is empty, expected one of json_schema, regex, choices", field="constraint"
        )
    said = request.constraint.choices.texts if kind == "choices" else getattr(request.constraint, kind)
    return constraint_of(kind, said if kind != "choices" else list(said))


def _tool_choice(request: generation_pb2.GenerateRequest) -> ToolChoice:
    choice, modes = request.tool_choice, conversation_pb2.ToolChoice.Mode
    if choice.mode not in modes.values():
        raise refused("tool_choice.mode", str(choice.mode), "one of NONE, AUTO, REQUIRED")
    if choice.mode == conversation_pb2.ToolChoice.MODE_UNSPECIFIED:
        mode = "auto" if request.messages.tools else "none"
    else:
        mode = modes.Name(choice.mode).lower()
    if choice.name and mode != "required":
        raise refused(
            "tool_choice.name", ascii(choice.name[:60]), "the name of a tool, and the mode REQUIRED"
        )
    names = (choice.name,) if choice.name else ()
    return ToolChoice(cast(CallMode, mode), names, choice.single or bool(names))


def _keep(request: generation_pb2.GenerateRequest) -> KeepOptions:
    keep = request.keep
    return KeepOptions(
        name=keep.display_name,
        ttl_s=keep.ttl.seconds if keep.HasField("ttl") else None,
        prompt_only=keep.prompt_only,
        turns=request.WhichOneof("prompt") in ("question", "messages"),
        moves=keep.move_name,
    )


def parse_batch(request: generation_pb2.BatchGenerateRequest) -> str:
    """The id of a batch's context; "" where it names none. Raises InvalidArgumentError also for too many requests."""
    count = len(request.requests)
    if not 1 <= count <= MAX_BATCH:
        raise InvalidArgumentError(
            f"requests has {count} elements, expected 1 to {MAX_BATCH}", field="requests"
        )
    return parse_name(request.context, "context") if request.context else ""


def content_tokens(
    request: generation_pb2.TokenizeRequest | generation_pb2.CountTokensRequest, tokenizer: Tokenizer
) -> list[int]:
    """The tokens of what a request is about. Raises InvalidArgumentError where there is nothing."""
    content = request.WhichOneof("content")
    if content is None:
        raise InvalidArgumentError("the content is missing, expected text or messages", field="content")
    if content == "text":
        return tokenizer.encode(request.text)
    return conversation_tokens(*parse_messages(request.messages), tokenizer)
