"""One request as doors and engine hold it, from the wire until its session ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from decode_engine.orders.fields import BUDGETS, Sampling
from index_store.models.conversation.messages import Message, Tool

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
        """The text, or the texts to choose from."""
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
    address that asks. caller: name of the token that was shown. traced: None where no spans are made.
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
    traced: Traced | None = None

    @property
    def has_budget(self) -> bool:
        """Whether the request says how much is kept."""
        return any(getattr(self, name) is not None for name in BUDGETS)

    @property
    def tells_logprobs(self) -> bool:
        """Whether log probabilities are wanted of any tokens."""
        return self.prompt_logprobs or self.sampling.top_logprobs is not None
