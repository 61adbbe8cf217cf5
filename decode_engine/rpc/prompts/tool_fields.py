"""Which tools a model may call, and how: what a request says of it, on the model that is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode_engine.engine.sampling.call_grammar import call_constraint
from decode_engine.orders.order import Constraint, ToolChoice
from decode_engine.settings.request_bounds import MAX_CONSTRAINT_BYTES
from index_store.models.conversation.call_syntax import CallReader, CallSyntax
from index_store.models.conversation.messages import Tool, refused
from index_store.models.tokenizer import Tokenizer

_FIELD = "tool_choice"


@dataclass(frozen=True, slots=True)
class CallPlan:
    """How an answer of calls is made and read. constraint: that it obeys. shown: special tokens that its text has."""

    syntax: CallSyntax
    constraint: Constraint
    forced: bool
    shown: frozenset[int]

    def reader(self) -> CallReader:
        """For one answer."""
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
