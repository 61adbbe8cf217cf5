"""What requests may contain: every check of a client's input, with its bounds."""

from __future__ import annotations

import json

from decode_engine.engine.sampling.parameters import SamplingParameters, parameters_of
from decode_engine.orders.order import Constraint, Order, Sampling
from decode_engine.rpc.answers.text import StopStrings
from decode_engine.rpc.contexts.names import parse_name
from decode_engine.rpc.prompts.keep_field import parse_keep
from decode_engine.rpc.prompts.tool_fields import parse_tool_choice
from decode_engine.rpc.prompts.turn_tokens import conversation_tokens
from decode_engine.rpc.prompts.wire_messages import parse_messages
from decode_engine.settings.request_bounds import (
    MAX_ANSWERS,
    MAX_BATCH,
    MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
    MAX_SEARCH_PERIOD,
    MAX_STOP_TOKENS,
)
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import MAX_MESSAGES, Message, Role, Tool, check_tools, refused
from index_store.models.tokenizer import Tokenizer
from sparsekv.v1 import generation_pb2

MAX_METHOD_CHARACTERS = 128


def parse_order(request: generation_pb2.GenerateRequest) -> Order:
    """Checks all that can be checked without the context. Raises InvalidArgumentError and names the field."""
    given = request.WhichOneof("prompt")
    if given is None:
        raise InvalidArgumentError(
            "the prompt is missing, expected one of text, token_ids, question, messages", field="prompt"
        )
    if given != "messages":
        content = request.token_ids.ids if given == "token_ids" else getattr(request, given)
        if not content:
            raise InvalidArgumentError(f"{given} is empty, expected at least one token", field=given)
    if given == "question" and not request.question.strip():
        raise InvalidArgumentError("the question is blank, expected words", field=given)
    if request.max_tokens < 0:
        raise InvalidArgumentError(
            f"max_tokens is {request.max_tokens}, expected 1 or more, or 0 for the default",
            field="max_tokens",
        )
    if len(request.method) > MAX_METHOD_CHARACTERS:
        raise InvalidArgumentError(
            f"method has {len(request.method)} characters, expected at most {MAX_METHOD_CHARACTERS}",
            field="method",
        )
    budget = request.WhichOneof("budget")
    if budget is not None:
        _check_budget(budget, getattr(request, budget))
    if not 0 <= request.search_period <= MAX_SEARCH_PERIOD:
        raise InvalidArgumentError(
            f"search_period is {request.search_period}, expected 1 to {MAX_SEARCH_PERIOD}, or 0 for the default",
            field="search_period",
        )
    StopStrings(request.stop)  # raises for too many or too long ones
    sampling = _parse_sampling(request)
    _check_answers(request, parameters_of(sampling))
    turns, tools = _parse_turns(request)
    return Order(
        context=parse_name(request.context, "context") if request.context else "",
        text=request.text if given == "text" else None,
        turns=turns,
        tools=tools,
        prompt=request.token_ids.ids,  # not copied: there may be millions, which the model has no positions for
        max_tokens=request.max_tokens or None,
        sampling=sampling,
        stops=tuple(request.stop),
        method=request.method,
        keep_ratio=request.keep_ratio if budget == "keep_ratio" else None,
        target_mass=request.target_mass if budget == "target_mass" else None,
        token_budget=request.token_budget if budget == "token_budget" else None,
        search_period=request.search_period or None,
        answers=request.n or 1,
        stop_token_ids=frozenset(request.stop_token_ids),
        prompt_logprobs=request.prompt_logprobs,
        constraint=_parse_constraint(request),
        choice=parse_tool_choice(request),
        keep=parse_keep(request) if request.HasField("keep") else None,
    )


def _parse_sampling(request: generation_pb2.GenerateRequest) -> Sampling:
    """How tokens are drawn."""
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p if request.HasField("top_p") else 1.0,
        top_k=request.top_k,
        seed=request.seed if request.HasField("seed") else None,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty or 1.0,
        logit_bias=dict(request.logit_bias),
        min_tokens=request.min_tokens,
        top_logprobs=request.top_logprobs if request.HasField("top_logprobs") else None,
    )


def _check_answers(request: generation_pb2.GenerateRequest, sampling: SamplingParameters) -> None:
    """Checks how many answers are wanted, and where they end."""
    if not 0 <= request.n <= MAX_ANSWERS:
        raise InvalidArgumentError(
            f"n is {request.n}, expected 1 to {MAX_ANSWERS}, or 0 for the default", field="n"
        )
    if request.n > 1 and sampling.greedy:
        raise InvalidArgumentError(
            f"n is {request.n} and nothing is sampled, so that all answers would be the same; expected n 1, or a "
            "temperature above 0 and a top_k other than 1",
            field="n",
        )
    if len(request.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidArgumentError(
            f"stop_token_ids has {len(request.stop_token_ids)} tokens, expected at most {MAX_STOP_TOKENS}",
            field="stop_token_ids",
        )
    if request.max_tokens and request.min_tokens > request.max_tokens:
        raise InvalidArgumentError(
            f"min_tokens is {request.min_tokens}, expected at most max_tokens, which is {request.max_tokens}",
            field="min_tokens",
        )
    if request.min_tokens and request.HasField("constraint"):
        raise InvalidArgumentError(
            f"min_tokens is {request.min_tokens} beside a constraint, which alone says where an answer may end; "
            "expected only one of them",
            field="min_tokens",
        )


def _parse_constraint(request: generation_pb2.GenerateRequest) -> Constraint | None:
    if not request.HasField("constraint"):
        return None
    kind = request.constraint.WhichOneof("kind")
    if request.constraint.ByteSize() > MAX_CONSTRAINT_BYTES:
        raise InvalidArgumentError(
            f"constraint has {request.constraint.ByteSize()} bytes, expected at most {MAX_CONSTRAINT_BYTES}",
            field="constraint",
        )
    if kind is None:
        raise InvalidArgumentError(
            "constraint is empty, expected one of json_schema, regex, choices", field="constraint"
        )
    if kind != "choices":
        text = getattr(request.constraint, kind)
        if not text:
            raise InvalidArgumentError(f"{kind} is empty, expected a text", field="constraint")
        return Constraint(kind, text)
    texts = list(request.constraint.choices.texts)
    if not 1 <= len(texts) <= MAX_CHOICES or not all(texts) or len(set(texts)) < len(texts):
        raise InvalidArgumentError(
            f"choices has {len(texts)} texts, expected 1 to {MAX_CHOICES} different ones, none of them empty",
            field="constraint",
        )
    return Constraint(kind, json.dumps(texts))


def _parse_turns(request: generation_pb2.GenerateRequest) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """The new turns of a request, and its tools. Whether they can follow is known with what they follow."""
    given = request.WhichOneof("prompt")
    if given == "question":
        return (Message(Role.USER, request.question),), ()
    if given != "messages":
        return (), ()
    count = len(request.messages.messages)
    if not 1 <= count <= MAX_MESSAGES:
        raise refused("messages", f"{count} messages", f"1 to {MAX_MESSAGES}")
    turns, tools = parse_messages(request.messages)
    check_tools(tools)
    if turns[-1].role is Role.ASSISTANT:
        raise refused(
            f"messages[{count - 1}].role",
            turns[-1].role,
            "user, tool, system or developer, which the model answers; it does not go on with what it said",
        )
    return turns, tools


def _check_budget(field: str, size: float) -> None:
    if field == "token_budget":
        if size < 1:
            raise InvalidArgumentError(f"{field} is {size}, expected at least 1", field=field)
    elif not 0.0 < size <= 1.0:  # NaN included
        raise InvalidArgumentError(
            f"{field} is {size:g}, expected a number above 0 and at most 1", field=field
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
