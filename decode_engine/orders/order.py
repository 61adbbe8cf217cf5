"""One request as doors and engine hold it, from the wire until its session ends, and what every door checks of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from decode_engine.orders.fields import (
    BUDGETS,
    CONSTRAINTS,
    FIELDS,
    MAX_METHOD_CHARACTERS,
    Sampling,
    check_count,
    check_drawn,
)
from decode_engine.settings.request_bounds import (
    MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
    MAX_NAME_CHARACTERS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TTL_S,
)
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import (
    MAX_MESSAGES,
    MAX_NAME,
    MAX_TOOLS,
    Message,
    Tool,
    check_tools,
    refused,
)
from index_store.store.description.callers import Caller

CallMode = Literal["none", "auto", "required"]
ConstraintKind = Literal["json_schema", "regex", "choices", "calls"]


class Constraint(Struct, frozen=True):
    """What an answer has to be.

    text: a JSON schema, a regular expression, a JSON list of texts to choose from, or calls of tools as a grammar of
    llguidance.
    """

    kind: ConstraintKind
    text: str

    @property
    def said(self) -> str | list[str]:
        return msgspec.json.decode(self.text, type=list[str]) if self.kind == "choices" else self.text


class KeepOptions(Struct, frozen=True, omit_defaults=True):
    """What is to become of a session.

    name: "" for the context's, with digits of its own id. ttl_s: None for good. turns: they are its prompt, and a token
    that ends one is kept. owner: who asked for it. moves: the name is taken from the context that has it.
    """

    name: str = ""
    ttl_s: int | None = None
    prompt_only: bool = False
    turns: bool = False
    owner: str = ""
    moves: bool = False


class ToolChoice(Struct, frozen=True):
    """What a request says of calls. names: of the tools that may be called; none for any. single: at most one call."""

    mode: CallMode = "none"
    names: tuple[str, ...] = ()
    single: bool = False


class Traced(Struct, frozen=True, array_like=True):
    """What a request is part of. parent: the door's span, as the header `traceparent`. operation: as OpenTelemetry's
    conventions call it."""

    parent: str
    operation: Literal["chat", "text_completion"]


class Order(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A checked request. None and "": as is usual.

    context: id of the stored context that the prompt continues; "" where the prompt is everything from the beginning.
    One of text, turns (with tools, and whether they are called) and prompt (token ids) is what was asked; the door
    makes it `prompt`, and the engine gets that alone. deadline_ns: on the system's monotonic clock, which all processes
    share. stops are found by the door, which reads the text; the engine learns of one by `Handle.stop`. client: the
    address that asks. caller: name of the token that was shown. tenant: whose requests count together, and whose
    contexts there are for it; admin: all there are. priority: among its tenant's requests that wait, higher ones are
    first. traced: None where no spans are made.
    """

    context: str = ""
    text: str | None = None
    turns: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    prompt: Sequence[int] = ()
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    constraint: Constraint | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    method: str = ""
    keep_ratio: float | None = None
    target_mass: float | None = None
    token_budget: int | None = None
    search_period: int | None = None
    answers: int = 1
    prompt_logprobs: bool = False
    explain: bool = False
    map_every: int | None = None
    keep: KeepOptions | None = None
    deadline_ns: int | None = None
    client: str = ""
    caller: str = ""
    tenant: str = ""
    admin: bool = False
    priority: int = 0
    traced: Traced | None = None

    @property
    def viewer(self) -> Caller:
        return Caller(self.tenant, frozenset(("admin",) if self.admin else ()), self.caller)

    @property
    def has_budget(self) -> bool:
        return any(getattr(self, name) is not None for name in BUDGETS)

    @property
    def tells_logprobs(self) -> bool:
        """Whether log probabilities are wanted of any tokens."""
        return self.prompt_logprobs or self.sampling.top_logprobs is not None


def check_order(order: Order) -> None:
    """Checks all that can be checked without context and model. Raises InvalidArgumentError and names the field."""
    if not (order.text or order.prompt or order.turns):
        empty = "token_ids" if order.text is None else "text"
        raise InvalidArgumentError(f"{empty} is empty, expected at least one token", field=empty)
    check_count("method", order.method, MAX_METHOD_CHARACTERS, "characters")
    for field in FIELDS:
        value = getattr(order, field.member or field.name, None)
        if value is not None:
            field.check(value)
    check_drawn(order.sampling)
    _check_stops(order)
    _check_answers(order)
    if order.turns:
        _check_turns(order)
    _check_choice(order)
    if order.keep is not None:
        _check_keep(order, order.keep)


def constraint_of(kind: ConstraintKind, said: str | Sequence[str]) -> Constraint:
    """What an answer has to be. said: the text, or the texts to choose from. Raises InvalidArgumentError."""
    if isinstance(said, str):
        if not said:
            raise InvalidArgumentError(f"{kind} is empty, expected a text", field="constraint")
        text = said
    else:
        if not 1 <= len(said) <= MAX_CHOICES or not all(said) or len(set(said)) < len(said):
            raise InvalidArgumentError(
                f"choices has {len(said)} texts, expected 1 to {MAX_CHOICES} different ones, none of them empty",
                field="constraint",
            )
        text = json.dumps(list(said))
    nbytes = len(text.encode())
    if nbytes > MAX_CONSTRAINT_BYTES:
        raise InvalidArgumentError(
            f"constraint has {nbytes} bytes, expected at most {MAX_CONSTRAINT_BYTES}", field="constraint"
        )
    return Constraint(kind, text)


def stop_tokens(ids: Sequence[int]) -> frozenset[int]:
    """Tokens that end an answer. Raises InvalidArgumentError for too many, those that are there twice counted twice."""
    check_count("stop_token_ids", ids, MAX_STOP_TOKENS, "tokens")
    return frozenset(ids)


def the_one(
    given: Sequence[str], names: Sequence[str] = CONSTRAINTS, field: str = "constraint"
) -> str | None:
    """The one of a few fields that is given, if any is. Raises InvalidArgumentError for several."""
    found = [name for name in names if name in given]
    if len(found) > 1:
        raise InvalidArgumentError(f"give at most one of {', '.join(names)}", field=field)
    return found[0] if found else None


def _check_stops(order: Order) -> None:
    if len(order.stops) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(
            f"{len(order.stops)} stop strings were given, expected at most {MAX_STOP_STRINGS}", field="stop"
        )
    for stop in order.stops:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidArgumentError(
                f"a stop string has {len(stop)} characters, expected 1 to {MAX_STOP_LENGTH}", field="stop"
            )


def _check_answers(order: Order) -> None:
    """Checks how many answers are wanted, and of how many tokens."""
    if order.answers > 1 and order.sampling.greedy:
        raise InvalidArgumentError(
            f"n is {order.answers} and nothing is sampled, so that all answers would be the same; expected n 1, or a "
            "temperature above 0 and a top_k other than 1",
            field="n",
        )
    least = order.sampling.min_tokens
    if order.max_tokens and least > order.max_tokens:
        raise InvalidArgumentError(
            f"min_tokens is {least}, expected at most max_tokens, which is {order.max_tokens}",
            field="min_tokens",
        )


def _check_turns(order: Order) -> None:
    """Whether turns can follow is known with what they follow."""
    count = len(order.turns)
    if count > MAX_MESSAGES:
        raise refused("messages", f"{count} messages", f"1 to {MAX_MESSAGES}")
    check_tools(order.tools)


def _check_choice(order: Order) -> None:
    """Checks the choice of tools, and what does not go with calls and constraints: these say where answers end."""
    choice: ToolChoice = order.choice
    check_count("tool_choice", choice.names, MAX_TOOLS, "names")
    for name in choice.names:
        if len(name) > MAX_NAME or choice.mode == "none":
            raise refused("tool_choice.name", ascii(name[:60]), "the name of a tool that may be called")
    calls, constraint = choice.mode != "none", order.constraint
    if not calls and constraint is None:
        return
    beside = f"the tool choice {choice.mode.upper()}" if calls else "a constraint"
    why = "NONE has the model say text alone" if calls else "a constraint says by itself where an answer ends"
    for field, given in (
        ("constraint", calls and constraint is not None and constraint.kind != "json_schema"),
        ("min_tokens", bool(order.sampling.min_tokens)),
        ("ignore_eos", order.ignore_eos),
        ("keep", order.keep is not None),
    ):
        if given:
            raise refused(field, f"it beside {beside}", f"one of them; {why}")


def _check_keep(order: Order, keep: KeepOptions) -> None:
    if len(keep.name) > MAX_NAME_CHARACTERS or not keep.name.isprintable():
        raise InvalidArgumentError(
            f"keep.display_name is {ascii(keep.name)[:100]}, expected at most {MAX_NAME_CHARACTERS} printable "
            "characters",
            field="keep.display_name",
        )
    if keep.ttl_s is not None and not 1 <= keep.ttl_s <= MAX_TTL_S:
        raise InvalidArgumentError(f"keep.ttl is {keep.ttl_s} s, expected 1 to {MAX_TTL_S}", field="keep.ttl")
    if keep.prompt_only and order.max_tokens:
        raise InvalidArgumentError(
            f"max_tokens is {order.max_tokens} and keep.prompt_only is set, which generates nothing; leave one out",
            field="max_tokens",
        )
    if order.answers > 1:
        raise InvalidArgumentError("keep is set, which goes with a single answer; leave out n", field="keep")
    if keep.moves and not keep.name:
        raise InvalidArgumentError(
            "keep.move_name is set without keep.display_name, which says what moves", field="keep.move_name"
        )
