"""How a model words calls of tools: found out from its own chat template, and read from what it says.

A template that has words for calls is run on calls of known names and arguments; what it writes around them is the
syntax, whichever family the model is of. Others get one in plain JSON.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from index_store.models.conversation.messages import Conversation, Message, Role, Tool, ToolCall

_TOOL, _KEY, _VALUE = "probe_tool", "probe_key", "probe value"
_ANSWER = "X#X"
_IDS = ("probe0001", "probe0002")
_ID_MEMBER = re.compile(r', *"id": *"probe000[12]"')
"""Which some templates write into earlier calls, and no model into new ones."""
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Some templates take ids of nine letters and digits alone."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """What stands around the names and arguments (a JSON object) of calls.

    open: before the first name. middle: between a name and its arguments. between: from arguments to the next name;
    None where a model makes one call at a time. close: behind the last arguments, up to the token that ends the turn.
    told: whether the template tells the model of tools. plain: whether it has no words for calls.
    """

    open: str
    middle: str
    close: str
    between: str | None
    told: bool
    plain: bool = False

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Calls as a model with a template that has no words for them would say them."""
        said = (f"{call.name}{self.middle}{call.arguments or '{}'}" for call in calls)
        return self.open + (self.between or "").join(said) + self.close


PLAIN = CallSyntax('{"name": "', '", "arguments": ', "}", '}\n{"name": "', told=False, plain=True)


def new_call_id() -> str:
    """An id for a call, which no other one has."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


Writes = Callable[[Conversation, bool], str | None]
"""What a template writes for a conversation, with or without the beginning of an answer; None where it fails."""


def find_syntax(writes: Writes, ends: Sequence[str]) -> CallSyntax | None:
    """The syntax of calls by a template; None where it words them in a way that is not understood.

    ends: texts of the special tokens that end an answer.
    """
    told = _TOOL in (writes(_conversation(told=True), False) or "")
    one, two = (_calls_written(writes, count, told) for count in (1, 2))
    if one is None or _TOOL not in one:
        return replace(PLAIN, told=told)
    first = _split(one)
    if first is None:
        return None
    opening, middle, rest = first
    close, between = _before(rest, ends), None
    same = one[: len(one) - len(rest)]
    if two is not None and two.startswith(same):
        second = _split(two[len(same) :])
        between = None if second is None or second[1] != middle else second[0]
    parts = (opening, middle, close, between or "")
    return None if any("probe" in part for part in parts) else CallSyntax(*parts[:3], between, told)


def _conversation(*answer: Message, told: bool) -> Conversation:
    parameters = {"type": "object", "properties": {_KEY: {"type": "string"}}}
    tools = (Tool(_TOOL, "Probes.", json.dumps(parameters)),) if told else ()
    return Conversation((Message(Role.USER, "What was said."), *answer), tools)


def _calls_written(writes: Writes, count: int, told: bool) -> str | None:
    """What the template writes for an answer of so many calls, from where the answer begins."""
    calls = tuple(ToolCall(_TOOL, json.dumps({_KEY: _VALUE}), id_) for id_ in _IDS[:count])
    whole = writes(_conversation(Message(Role.ASSISTANT, tool_calls=calls), told=told), False)
    begun = writes(_conversation(told=told), True)
    answered = writes(_conversation(Message(Role.ASSISTANT, _ANSWER), told=told), False)
    if whole is None or begun is None or answered is None:
        return None
    # Before an answer a template may write what it does not write into an earlier one, and the other way round.
    start = min(common_start(whole, begun), common_start(whole, answered.partition(_ANSWER)[0]))
    return _ID_MEMBER.sub("", whole[start:])


def _split(text: str) -> tuple[str, str, str] | None:
    """What stands before the first name, between it and its arguments, and behind these."""
    before, name, after = text.partition(_TOOL)
    brace = after.find("{")
    if not name or brace < 0:
        return None
    while brace >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(after, brace)
        except ValueError:
            value, end = None, 0
        if value == {_KEY: _VALUE}:
            return before, after[:brace], after[end:]
        brace = after.find("{", brace + 1)
    return None


def _before(text: str, ends: Sequence[str]) -> str:
    """The text up to the first of these, or without the white space at its end."""
    places = [place for end in ends if (place := text.find(end)) >= 0]
    return text[: min(places)] if places else text.rstrip()


def common_start(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one.startswith(other[:middle]):
            least = middle
        else:
            most = middle - 1
    return least


def plainly(conversation: Conversation, syntax: CallSyntax) -> Conversation:
    """The same for a template without words for calls: those are what the model said, and answers a user's messages."""

    def worded(message: Message) -> Message:
        if message.tool_calls:
            said = f"{message.content}\n" if message.content else ""
            return Message(Role.ASSISTANT, said + syntax.write(message.tool_calls), message.name)
        return Message(Role.USER, message.content) if message.role is Role.TOOL else message

    return replace(conversation, messages=tuple(map(worded, conversation.messages)))


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a call that a model makes. index: which of its calls. id, name: in the first part alone."""

    index: int
    id: str
    name: str
    arguments: str


class CallReader:
    """Tells calls from text in what a model says piece by piece. It says calls exactly as the syntax has them."""

    def __init__(self, syntax: CallSyntax, *, forced: bool) -> None:
        """forced: calls alone are said, from the beginning."""
        self._syntax = syntax
        self._trigger = trigger_of(syntax)
        self._held = ""
        self._calls = 0
        self._arguments = _JsonEnd()
        self._step = self._name if forced else self._text
        self._wanted = syntax.open
        self.finished = 0
        """Calls whose arguments are whole."""

    def push(self, text: str) -> tuple[str, list[CallPart]]:
        """What a piece adds: text that is none of a call, and parts of calls."""
        self._held += text
        said, parts = "", []
        while True:
            before = (self._step, len(self._held))
            told = self._step()
            if isinstance(told, str):
                said += told
            elif told is not None:
                parts.append(told)
            if (self._step, len(self._held)) == before:
                return said, parts

    def flush(self) -> str:
        """Text that was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held if self._step == self._text else ""

    def _text(self) -> str | None:
        """Before any call: white space and what may begin one are held back."""
        place = self._held.find(self._trigger)
        if place >= 0:
            said, self._held = self._held[:place].rstrip(), self._held[place:]
            self._step = self._name
            return said
        keep = next(
            length
            for length in range(min(len(self._held), len(self._trigger) - 1), -1, -1)
            if self._trigger.startswith(self._held[len(self._held) - length :])
        )
        certain = self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(certain) :]
        return certain or None

    def _name(self) -> CallPart | None:
        """From what stands before a name to its end."""
        end = self._held.find(self._syntax.middle, len(self._wanted))
        if end < 0 or not self._held.startswith(self._wanted):
            return None
        name, self._held = self._held[len(self._wanted) : end], self._held[end + len(self._syntax.middle) :]
        self._arguments, self._step = _JsonEnd(), self._object
        self._calls += 1
        return CallPart(self._calls - 1, new_call_id(), name, "")

    def _object(self) -> CallPart | None:
        """Arguments, as far as they have come."""
        end = self._arguments.push(self._held)
        part, self._held = self._held[:end], self._held[end:]
        if self._arguments.ended:
            self.finished += 1
            self._wanted, self._step = self._syntax.between or "", self._next
        return CallPart(self._calls - 1, "", "", part) if part else None

    def _next(self) -> None:
        """Behind arguments: another call, or nothing that matters."""
        if self._wanted and self._held.startswith(self._wanted):
            self._step = self._name


def trigger_of(syntax: CallSyntax) -> str:
    """What tells in the middle of a text that a call begins: the mark before its JSON, or all before its name."""
    brackets = [place for letter in "{[" if (place := syntax.open.find(letter)) > 0]
    mark = syntax.open[: min(brackets, default=0)].strip()
    return mark if len(mark) > 2 else syntax.open


class _JsonEnd:
    """Finds the end of a JSON object that comes piece by piece."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False
        self.ended = False

    def push(self, text: str) -> int:
        """How many characters of the piece belong to the object."""
        for place, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return place + 1
        return len(text)
