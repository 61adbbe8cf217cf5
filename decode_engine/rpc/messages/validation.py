"""What requests may contain: every check of a client's input, with its bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from decode_engine.engine.sampler import SamplingParameters
from decode_engine.engine.sampling.logit_rules import LogitRules
from decode_engine.engine.sampling.matching import Constraint
from decode_engine.engine.text import StopStrings
from decode_engine.errors import PromptTooLongError
from decode_engine.model.continuing import KeepOptions
from decode_engine.model.method_choice import AUTO
from decode_engine.rpc.contexts.defaults import default_method
from decode_engine.rpc.contexts.names import parse_name
from decode_engine.rpc.prompts.keep_field import parse_keep
from decode_engine.rpc.prompts.stored_messages import StoredMessages
from decode_engine.rpc.prompts.tool_fields import ToolChoice, parse_tool_choice
from decode_engine.rpc.prompts.turn_tokens import conversation_tokens, turn_tokens
from decode_engine.rpc.prompts.wire_messages import parse_messages
from decode_engine.settings.request_bounds import (
    MAX_ANSWERS,
    MAX_BATCH,
    MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
    MAX_PROMPT_LOGPROBS,
    MAX_SEARCH_PERIOD,
    MAX_STOP_TOKENS,
)
from index_store.errors import InvalidArgumentError
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.models.conversation.messages import MAX_MESSAGES, Message, Role, Tool, check_tools, refused
from index_store.models.loading import Tokenizer
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.manifest import Manifest
from index_store.store.tuned_defaults import TunedDefault
from sparsekv.v1 import generation_pb2

DEFAULT_MAX_TOKENS = 256
MAX_METHOD_CHARACTERS = 128
MIN_APPEND_BLOCK = 16  # every move of the window costs a search and an append, however short


@dataclass(frozen=True, slots=True)
class Order:
    """A checked Generate request. None: as is usual (max_tokens: as many as fit). method "": the context's own.

    The prompt is a text, turns of a conversation (a question is one) or token ids. tools: that the
    request names. choice: whether they are called. context_id: "" where the prompt is everything from the beginning.
    """

    context_id: str
    text: str | None
    turns: tuple[Message, ...]
    tools: tuple[Tool, ...]
    token_ids: Sequence[int]
    max_tokens: int | None
    sampling: SamplingParameters
    stops: tuple[str, ...]
    method: str
    keep_ratio: float | None
    target_mass: float | None
    token_budget: int | None
    search_period: int | None
    answers: int
    stop_token_ids: frozenset[int]
    prompt_logprobs: bool
    constraint: Constraint | None
    choice: ToolChoice
    keep: KeepOptions | None = None

    @property
    def tells_logprobs(self) -> bool:
        """Whether log probabilities are wanted of any tokens."""
        return self.prompt_logprobs or self.sampling.top_logprobs is not None

    @property
    def has_budget(self) -> bool:
        """Whether the request says how much is kept."""
        return any(size is not None for size in (self.keep_ratio, self.target_mass, self.token_budget))


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
    _check_answers(request, sampling)
    turns, tools = _parse_turns(request)
    return Order(
        context_id=parse_name(request.context, "context") if request.context else "",
        text=request.text if given == "text" else None,
        turns=turns,
        tools=tools,
        token_ids=request.token_ids.ids,  # not copied: there may be millions, which the model has no positions for
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


def _parse_sampling(request: generation_pb2.GenerateRequest) -> SamplingParameters:
    """How tokens are drawn, but for the constraint."""
    return SamplingParameters(
        temperature=request.temperature,
        top_p=request.top_p if request.HasField("top_p") else 1.0,
        top_k=request.top_k,
        seed=request.seed if request.HasField("seed") else None,
        rules=LogitRules(
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty or 1.0,
            logit_bias=dict(request.logit_bias),
            min_tokens=request.min_tokens,
        ),
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


def choose_method(order: Order, manifest: Manifest, tuned: TunedDefault | None = None) -> Method:
    """The method that an order means on a context: its own where the order leaves that open, or to the server.

    tuned: the default that the context was tuned to, if it was.

    Raises MethodUnsupportedError for an unknown one, for parts that do not go together, and for a budget or search
    period where nothing is cut; InvalidArgumentError for a value out of range.
    """
    name, sizes = order.method, (order.keep_ratio, order.target_mass, order.token_budget)
    if name in ("", AUTO):
        default = default_method(manifest, tuned)
        name = default.expression
        if not order.has_budget:
            sizes = (default.keep, default.mass, default.tokens)
    keep, mass, tokens = sizes
    method = get_method(name, keep, order.search_period, mass=mass, tokens=tokens)
    if method.schedule.period > MAX_SEARCH_PERIOD:
        raise InvalidArgumentError(
            f"method {name!r}: @period is {method.schedule.period}, expected 1 to {MAX_SEARCH_PERIOD}",
            field="method",
        )
    if method.append_block < MIN_APPEND_BLOCK:
        raise InvalidArgumentError(
            f"method {name!r}: @append_block is {method.append_block}, expected {MIN_APPEND_BLOCK} to "
            f"{manifest.model.max_positions}",
            field="method",
        )
    return method


def prompt_tokens(
    order: Order,
    tokenizer: Tokenizer,
    manifest: Manifest,
    identity: ModelIdentity,
    stored: StoredMessages,
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """The prompt in tokens. check: called now and then while a long text is cut; what it raises ends that.

    Raises InvalidArgumentError for turns that cannot follow the context, and PromptTooLongError, before it has cost
    more than the model's positions are worth, for what they do not hold in any case.
    """
    room = identity.max_positions - manifest.token_count
    text = "".join(turn.content for turn in order.turns) if order.text is None else order.text
    least = len(order.token_ids) or tokenizer.at_least(text, room, check)
    if least > room:
        raise PromptTooLongError(
            f"the prompt has at least {least} tokens, and after the context's {manifest.token_count} there is room for "
            f"{max(room, 0)} of the {identity.max_positions} positions of model {identity.name!r}; shorten the prompt",
            context_tokens=manifest.token_count,
            prompt_tokens=least,
            max_positions=identity.max_positions,
        )
    if order.turns:
        return turn_tokens(order.turns, order.tools, tokenizer, stored)
    return list(order.token_ids) if order.text is None else tokenizer.encode_behind(order.text)


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
    check_tokens("logit_bias", order.sampling.rules.logit_bias, identity)
    check_tokens("stop_token_ids", order.stop_token_ids, identity)


def check_tokens(field: str, ids: Iterable[int], identity: ModelIdentity) -> None:
    """Raises InvalidArgumentError for a token that the model has not."""
    largest = max(ids, default=0)
    if largest >= identity.vocab_size:
        raise InvalidArgumentError(
            f"{field} contains {largest}, expected ids of 0 to {identity.vocab_size - 1}", field=field
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


def fit_max_tokens(order: Order, manifest: Manifest, identity: ModelIdentity, prompt: int) -> int:
    """How many tokens may be generated after a prompt of that many tokens: as many as are wanted, or as fit.

    Raises PromptTooLongError when the model has no positions for one, or `min_tokens`.
    """
    room = identity.max_positions - manifest.token_count - prompt
    least = max(1, order.sampling.rules.min_tokens)
    if least > room:
        raise PromptTooLongError(
            f"context ({manifest.token_count} tokens), prompt ({prompt}) and completion ({least} at least) exceed the "
            f"{identity.max_positions} positions of model {identity.name!r}; shorten the prompt",
            context_tokens=manifest.token_count,
            prompt_tokens=prompt,
            max_tokens=least,
            max_positions=identity.max_positions,
        )
    if order.keep is not None and order.keep.prompt_only:
        return 1
    return min(order.max_tokens or max(DEFAULT_MAX_TOKENS, least), room)
