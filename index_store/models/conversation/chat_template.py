"""A model's own chat template over messages: the text that it writes, and which of its characters come from a user.

The template is run twice: on the real texts, and with every letter and digit of a user's text replaced by a mark that
says which text it is of. Both renderings must agree wherever there is no mark. So whatever a template does with a text
(strip it, write it as JSON) is kept; a template that reads words in a text and writes something else for them is
refused, and no text can pass for what the template writes, whatever it contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from jinja2 import Environment, TemplateError, meta
from tokenizers import Tokenizer as Pipeline

from index_store.errors import InvalidArgumentError
from index_store.models.conversation.call_syntax import CallSyntax, find_syntax, plainly
from index_store.models.conversation.messages import Conversation, Message, Role, parse_object

_FIRST_MARK = 0xF0000
_MARKS = 0xFFFE
"""Characters for private use: a template writes none, and no tokenizer has a special token of them."""

_SCHEMA_WORDS = frozenset(
    {
        *(
            "type",
            "properties",
            "required",
            "description",
            "enum",
            "items",
            "default",
            "format",
            "title",
            "const",
        ),
        *(
            "anyOf",
            "oneOf",
            "allOf",
            "not",
            "minimum",
            "maximum",
            "minLength",
            "maxLength",
            "pattern",
            "minItems",
        ),
        *("maxItems", "uniqueItems", "additionalProperties", "nullable", "$ref", "$defs"),
        *("object", "string", "integer", "number", "boolean", "array", "null"),
    }
)
"""Words of JSON schemas by which templates decide what to write; they are no user's words."""

_TOLD = re.compile(
    "messages|tools|documents|add_generation_prompt|strftime_now|raise_exception|(bos|eos|pad|unk|sep|cls|mask)_token"
)
"""What templates get in any case."""
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A mark of transformers' own, which Jinja does not know."""
_DATE_FORMAT = re.compile(r"""["']([^"'\n]*%[^"'\n]*)["']""")
_FIXED_DATES = "{% macro strftime_now(format) %}{{ dates_of_template[format] }}{% endmacro %}\n"
"""In front of a template that writes today's date: what it takes for today is told to it, or the same messages would
have other tokens tomorrow."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """What a template wrote. text: as a model reads it. marks: the same with a mark for each letter of a user."""

    text: str
    marks: str

    def after(self, start: int) -> Rendering:
        return Rendering(self.text[start:], self.marks[start:])

    def before(self, end: int) -> Rendering:
        return Rendering(self.text[:end], self.marks[:end])

    def last_mark(self) -> int:
        """The place behind the last letter of a user's; 0 without one."""
        found = [match.end() for match in _MARKED.finditer(self.marks)]
        return found[-1] if found else 0


_MARKED = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + _MARKS - 1)}]+")


class _Marker:
    """Replaces what could be part of a special token by marks, one for each text."""

    def __init__(self, also: str, spoken: Sequence[str]) -> None:
        """also: further characters to replace, of special tokens without letters. spoken: see ChatTemplate."""
        letters = rf"(?:[^\W_]|[{re.escape(also)}])+" if also else r"[^\W_]+"
        kept = "|".join(map(re.escape, sorted(spoken, key=len, reverse=True)))
        self._letters = re.compile(letters)
        self._spoken_or_letters = re.compile(f"({kept})|{letters}" if kept else f"(?!)()|{letters}")
        self.places: list[str] = []
        """What the texts are, by the number of their mark."""

    def mark(self, place: str, text: str, *, of_model: bool = False) -> str:
        """The text with marks. place: what it is, as errors call it; "" for what a template may leave out.

        of_model: the model said it, so that the tokens that it speaks are among its words.
        """
        mark = chr(_FIRST_MARK + len(self.places) % _MARKS)
        self.places.append(place if self._letters.search(text) else "")
        if of_model:
            return self._spoken_or_letters.sub(lambda found: found[1] or mark * len(found[0]), text)
        return self._letters.sub(lambda letters: mark * len(letters[0]), text)

    def mark_json(self, place: str, value: Any) -> Any:
        """A JSON value with marks in its texts and names, but for the words of schemas."""
        if isinstance(value, str):
            return value if value in _SCHEMA_WORDS else self.mark(place, value)
        if isinstance(value, list):
            return [self.mark_json(place, item) for item in value]
        if isinstance(value, dict):
            return {self.mark_json(place, name): self.mark_json(place, item) for name, item in value.items()}
        return value

    def left_out(self, marks: str) -> str | None:
        """A text that has letters, none of which was written; None where there is no such."""
        written = set(marks)
        for number, place in enumerate(self.places):
            if place and chr(_FIRST_MARK + number % _MARKS) not in written:
                return place
        return None


class ChatTemplate:
    """The chat template of a tokenizer of transformers."""

    def __init__(
        self,
        backend: Any,
        name: str,
        letterless: str = "",
        spoken: Sequence[str] = (),
        ends: Sequence[str] = (),
    ) -> None:
        """name: of the model, for errors. letterless: characters of special tokens without letters and digits.

        spoken: special tokens that a model writes into its own answers, such as the marks around its thoughts, by which
        templates tell what of an answer to repeat. ends: special tokens that end an answer.
        """
        self._backend = backend
        self.name = name
        self._letterless = letterless
        self._spoken = tuple(spoken)
        self._ends = tuple(ends)

    @cached_property
    def calls(self) -> CallSyntax | None:
        """How the model words calls of tools; None in a way that is not understood.

        Raises InvalidArgumentError when the model has no chat template.
        """
        self._check_known()

        def writes(conversation: Conversation, answer_follows: bool) -> str | None:
            try:
                return self._write(conversation, datetime.now(UTC), answer_follows, None, 0)
            except InvalidArgumentError:
                return None

        return find_syntax(writes, self._ends)

    @cached_property
    def _developers(self) -> bool:
        """Whether it has words for messages of developers."""
        return "developer" in str(self._backend.chat_template)

    @cached_property
    def reads(self) -> frozenset[str]:
        """Variables that it reads and nobody sets here, and "name" where it says who speaks."""
        if not self._backend.chat_template:
            return frozenset()
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        template = _GENERATION.sub("", str(self._backend.get_chat_template(tools=None)))
        try:
            found = meta.find_undeclared_variables(environment.parse(template))
            said = {self._write(_named(name), datetime.now(UTC), True, None, 0) for name in ("one", "two")}
        except (TemplateError, InvalidArgumentError):
            return frozenset()
        unset = (name for name in found if not (_TOLD.fullmatch(name) or name in environment.globals))
        return frozenset(unset) | ({"name"} if len(said) > 1 else set())

    def _check_known(self) -> None:
        if not self._backend.chat_template:
            raise InvalidArgumentError(
                f"model {self.name!r} has no chat template, so it is not known how to ask it; "
                "pass the prompt word for word instead"
            )

    def render(
        self, conversation: Conversation, moment: datetime, *, answer_follows: bool, new: int = 0
    ) -> Rendering:
        """What the template writes for a conversation.

        moment: what the template takes for the present, where it writes a date. new: the first message that is marked;
        those before it are known to be wholly before what is used of the rendering, and errors count from it.
        Calls of tools and their answers are worded as `call_syntax.plainly` does for a template that has no words for
        them. Raises InvalidArgumentError when the model has no chat template, or its template fails, leaves a text out,
        or rewrites one.
        """
        self._check_known()
        of_tools = any(one.tool_calls or one.role is Role.TOOL for one in conversation.messages)
        if of_tools and self.calls and self.calls.plain:
            conversation = plainly(conversation, self.calls)
        text = self._write(conversation, moment, answer_follows, None, 0)
        marker = _Marker(self._letterless, self._spoken)
        marks = self._write(conversation, moment, answer_follows, marker, new)
        if len(text) != len(marks) or not _agree(text, marks):
            raise InvalidArgumentError(
                f"the chat template of model {self.name!r} writes something else for some words of the messages than "
                "these words; leave them out, or pass the prompt word for word instead"
            )
        missing = marker.left_out(marks)
        if missing is not None:
            raise InvalidArgumentError(
                f"the chat template of model {self.name!r} leaves {missing} out; leave it out of the request, say it "
                "in another message (what a system says: in the first one), or pass the prompt word for word",
                field=missing,
            )
        return Rendering(text, marks)

    def _write(
        self,
        conversation: Conversation,
        moment: datetime,
        answer_follows: bool,
        marker: _Marker | None,
        new: int,
    ) -> str:
        messages = [
            _message_fields(
                f"messages[{number - new}]", message, marker if number >= new else None, self._developers
            )
            for number, message in enumerate(conversation.messages)
        ]
        tools = list(_tool_fields(conversation, marker if new == 0 else None)) or None
        try:
            template = self._backend.get_chat_template(tools=tools)
            dates = {format_: moment.strftime(format_) for format_ in _DATE_FORMAT.findall(template)}
            return str(
                self._backend.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=_FIXED_DATES + template if "strftime_now" in template else template,
                    tokenize=False,
                    add_generation_prompt=answer_follows,
                    dates_of_template=dates,
                )
            )
        except (TemplateError, ValueError, TypeError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            told = any(one.role in (Role.SYSTEM, Role.DEVELOPER) for one in conversation.messages)
            advice = "; say what the system says in the first message of the user" if told else ""
            raise InvalidArgumentError(
                f"the chat template of model {self.name!r} fails: {reason}{advice}"
            ) from error


def _named(name: str) -> Conversation:
    return Conversation((Message(Role.USER, "-", name),))


def _agree(text: str, marks: str) -> bool:
    """Whether the renderings are the same between the marks."""
    position = 0
    for match in _MARKED.finditer(marks):
        if text[position : match.start()] != marks[position : match.start()]:
            return False
        position = match.end()
    return text[position:] == marks[position:]


def _message_fields(
    place: str, message: Message, marker: _Marker | None, developers: bool
) -> Mapping[str, Any]:
    """A message as templates take it; with a marker, with marks in its texts. developers: whether it knows any."""

    def said(name: str, text: str, *, of_model: bool = False) -> str:
        return text if marker is None else marker.mark(name and f"{place}.{name}", text, of_model=of_model)

    content = said("content", message.content, of_model=message.role is Role.ASSISTANT)
    role = Role.SYSTEM if message.role is Role.DEVELOPER and not developers else message.role
    fields: dict[str, Any] = {"role": role.value, "content": content}
    if message.name:  # which few templates say
        fields["name"] = said("", message.name)
    if message.tool_call_id:
        fields["tool_call_id"] = said("", message.tool_call_id)
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                **({"id": said("", call.id)} if call.id else {}),
                "function": {
                    "name": said(f"tool_calls[{number}].name", call.name),
                    "arguments": _arguments(call.arguments, marker),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return fields


def _tool_fields(conversation: Conversation, marker: _Marker | None) -> Iterator[Mapping[str, Any]]:
    """The tools as templates take them."""
    for number, tool in enumerate(conversation.tools):
        place = f"tools[{number}]"
        name, description = tool.name, tool.description
        if marker is not None:
            name = marker.mark(f"{place}.name", name)
            description = marker.mark(f"{place}.description", description)
        schema = tool.parameters or '{"type": "object", "properties": {}}'
        parameters = _json(f"{place}.parameters", schema, marker)
        function = {"name": name, "description": description, "parameters": parameters}
        yield {"type": "function", "function": function}


def _arguments(text: str, marker: _Marker | None) -> Any:
    """What a tool was called with: an object, or the text of what is none, as of a call that was cut."""
    try:
        return _json("", text, marker)
    except InvalidArgumentError:
        return text if marker is None else marker.mark("", text)


def _json(place: str, text: str, marker: _Marker | None) -> Any:
    value = parse_object(place, text)
    return value if marker is None else marker.mark_json(place, value)


_BEFORE = ("\n", ".", "a", "0")
"""Texts that are put before another one to see its tokens there; one of them does not merge with it."""

_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """One special token. lstrip, rstrip: whether it takes the white space before and behind it with it."""

    id: int
    text: str
    lstrip: bool
    rstrip: bool


class OrdinaryText:
    """What a tokenizer of transformers makes of texts in which nothing is special."""

    def __init__(self, backend: Any, end_ids: Sequence[int]) -> None:
        """end_ids: of tokens that end an answer."""
        self._backend = backend
        known = backend.added_tokens_decoder
        template = str(backend.chat_template or "")
        self.special = tuple(
            SpecialToken(id_, token.content, token.lstrip, token.rstrip)
            for id_, token in known.items()
            if token.special or id_ in end_ids or (not token.content.isspace() and token.content in template)
        )
        # What stands for text that a vocabulary lacks is special, and ordinary text may well become it.
        self._never = frozenset(token.id for token in self.special) - {backend.unk_token_id}

    @property
    def spoken(self) -> tuple[str, ...]:
        """Special tokens that are not flagged so: a model writes them into its answers, where they are read as text."""
        known = self._backend.added_tokens_decoder
        return tuple(token.text for token in self.special if not known[token.id].special)

    @property
    def letterless(self) -> str:
        """Characters of special tokens that have neither letters nor digits."""
        return "".join(
            sorted(
                {
                    letter
                    for token in self.special
                    for letter in token.text
                    if not re.search(r"[^\W_]", token.text)
                }
            )
        )

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Token ids of a text. first: False for a text that stands behind others.

        Raises InvalidArgumentError for a text that this tokenizer can only write by a special token.
        """
        return self._encode(text, self._first if first else self._later)

    def encode_behind(self, text: str) -> list[int]:
        """Token ids of a text that goes on where another one ends: without what a tokenizer puts before a first text.

        Raises InvalidArgumentError as `encode` does.
        """
        if text and self._puts_something_before:
            for before in _BEFORE:
                ids = self._behind(before, text)
                if ids is not None:
                    return ids
        return self.encode(text)

    def encode_rendering(
        self, rendering: Rendering, *, first: bool = True, behind_text: bool = False
    ) -> list[int]:
        """Token ids of what a chat template wrote, its special tokens among them.

        first: False for what stands behind others; behind_text: and goes on where a text ends.
        """
        ids: list[int] = []
        position = 0
        for start, end, token in [*self._found(rendering), (len(rendering.text), 0, None)]:
            if start > position:
                text = rendering.text[position:start]
                begins = behind_text and not ids
                ids += self.encode_behind(text) if begins else self.encode(text, first=first and not ids)
            if token is not None:
                ids.append(token.id)
            position = end
        return ids

    def shown(self, ids: Sequence[int]) -> str:
        """The first token and its text, as errors quote it."""
        if not ids:
            return "nothing"
        text = self._backend.decode(list(ids[:1]), clean_up_tokenization_spaces=False)
        return f"{ids[0]} ({text!r})"

    def _found(self, rendering: Rendering) -> Iterable[tuple[int, int, SpecialToken]]:
        """The template's special tokens: where each begins and ends, with the white space that it takes."""
        if self._pattern is None:
            return
        marks, position = rendering.marks, 0
        for match in self._pattern.finditer(marks):
            token = self._by_text[match[0]]
            start, end = match.span()
            if token.lstrip:
                start = position + len(marks[position:start].rstrip())
            if token.rstrip:
                end = _BLANKS.match(marks, end).end()  # type: ignore[union-attr]  # which nothing fits, too
            if start >= position:
                yield start, end, token
                position = end

    @cached_property
    def _puts_something_before(self) -> bool:
        """Whether a text has other tokens where nothing stands before it; found out by trying."""
        tried = ((text, self._behind(before, text)) for text in ("a", "1") for before in _BEFORE)
        return any(ids is not None and ids != self.encode(text) for text, ids in tried)

    def _behind(self, before: str, text: str) -> list[int] | None:
        """Token ids of a text behind another one; None where the two merge."""
        head, ids = self.encode(before), self.encode(before + text)
        return ids[len(head) :] if ids[: len(head)] == head else None

    @cached_property
    def _by_text(self) -> dict[str, SpecialToken]:
        return {token.text: token for token in self.special}

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """Finds special tokens, of several in one place the longest."""
        if not self.special:
            return None
        texts = sorted(self._by_text, key=len, reverse=True)
        initials = "".join(re.escape(letter) for letter in sorted({text[0] for text in texts}))
        return re.compile(f"(?=[{initials}])(?:{'|'.join(map(re.escape, texts))})")

    @cached_property
    def _first(self) -> Pipeline | None:
        """The tokenizer's own pipeline, blind for special tokens; None for one that is written in Python."""
        own = getattr(self._backend, "backend_tokenizer", None)
        return None if own is None else self._blind(own.to_str())

    @cached_property
    def _later(self) -> Pipeline | None:
        """The same for texts behind others: some tokenizers put a blank before the first text alone."""
        own = getattr(self._backend, "backend_tokenizer", None)
        if own is None:
            return None
        document = own.to_str()
        later = re.sub(r'("prepend_scheme"\s*:\s*)"first"', r'\1"never"', document)
        return self._first if later == document else self._blind(later)

    def _blind(self, document: str) -> Pipeline:
        if self.spoken:
            fields = json.loads(document)
            special = {token.id for token in self.special}
            for token in fields["added_tokens"]:
                token["special"] = token["special"] or token["id"] in special
            document = json.dumps(fields)
        pipeline = Pipeline.from_str(document)
        pipeline.no_truncation()
        pipeline.no_padding()
        pipeline.encode_special_tokens = True
        return pipeline

    def _encode(self, text: str, pipeline: Pipeline | None) -> list[int]:
        if not text:
            return []
        if pipeline is None:
            found = self._backend(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
            ids, offsets = list(found["input_ids"]), []
        else:
            encoding = pipeline.encode(text, add_special_tokens=False)
            ids = encoding.ids
            offsets = [] if self._never.isdisjoint(ids) else encoding.offsets
        if self._never.isdisjoint(ids):
            return ids
        # A vocabulary may hold a special token as a word, too: where that word is cut, it is none.
        place = next(place for place, id_ in enumerate(ids) if id_ in self._never)
        start, end = offsets[place] if offsets else (0, 0)
        if end - start < 2:
            raise InvalidArgumentError(
                f"the text contains {self._backend.convert_ids_to_tokens(ids[place])!r}, which this model's tokenizer "
                "can only write as a special token; leave it out"
            )
        return self._encode(text[: start + 1], pipeline) + self.encode_behind(text[start + 1 :])
