"""Schemas, and calls of tools, as grammars."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import AnyUrl, BaseModel, Field, FilePath, SecretStr, TypeAdapter

from decode_engine.engine.sampling.call_grammar import call_constraint
from decode_engine.engine.sampling.matching import (
    Constraint,
    UnfitConstraintError,
    allowed_tokens,
    make_matcher,
)
from decode_engine.engine.sampling.schemas import FORMATS, obeyed_schema
from decode_engine.engine.sampling.trial import VocabularySource
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.call_syntax import CallReader
from index_store.models.conversation.messages import Tool
from index_store.models.loading import resolve_model
from index_store.models.tokenizer import Tokenizer, load_tokenizer
from tests.index_store.models.conversation.test_call_syntax import MARKED
from tests.support.serving.chat import WITH_TOOLS, write_chat_tokenizer

BYTES = LLTokenizer("byte")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(9, ge=0, le=9, description="How many are left.")


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str | None = Field(None, title="Name", examples=["Rex"])


class Node(BaseModel):
    value: str = Field(max_length=5)
    children: list[Node] = Field([], max_length=2)


class Everything(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    colour: Colour
    near: Optional[Colour] = None  # noqa: UP045  as people write it
    tree: Node | None = None
    path: FilePath
    secret: SecretStr
    where: AnyUrl
    price: Decimal
    by_colour: dict[Literal["red", "blue"], int]
    labels: dict[str, int] = Field(max_length=2)
    pair: tuple[int, str]
    one: set[int] = Field(max_length=1)


OBJECT: Any = {"type": "object"}
INTEGER: Any = {"type": "integer"}


def _having(**properties: Any) -> dict[str, Any]:
    return {**OBJECT, "properties": properties}


def answers(schema: dict[str, Any], count: int = 20) -> list[Any]:
    """What random answers that obey the schema come to; those that do not end are left out."""
    found = []
    for seed in range(count):
        matcher = make_matcher(BYTES, Constraint("json_schema", json.dumps(schema)))
        draw, text = random.Random(seed), bytearray()
        while not matcher.is_stopped() and len(text) < 4000:
            closing = allowed_tokens(matcher)
            likely = [byte for byte in closing if chr(byte) in '"}]0123456789'] or closing
            chosen = draw.choice(likely if draw.random() < 0.9 else closing)
            assert matcher.consume_token(chosen)
            text += bytes([chosen]) if chosen < 256 else b""
        if matcher.is_stopped():
            found.append(json.loads(text.decode("utf-8", "replace")))
    return found


@pytest.mark.parametrize("kind", [Everything, list[Cat | Dog], dict[str, Node], Node, Decimal | None])
def test_ordinary_models_are_obeyed(kind: Any) -> None:
    schema = TypeAdapter(kind).json_schema()
    found = answers(
        {"type": "object", "properties": {"it": schema}, "required": ["it"]}
        if "$defs" not in schema
        else schema
    )
    assert found
    for answer in found:
        wanted = schema if "$defs" in schema else {"type": "object", "properties": {"it": schema}}
        jsonschema.Draft202012Validator(wanted).validate(answer)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "path", "maxLength": 3},
        {
            "type": "string",
            "format": "regex",
            "maxLength": 3,
            "contentEncoding": "x",
            "readOnly": True,
            "x-order": 1,
        },
        {
            "type": "array",
            "items": {"type": "integer", "format": "uint8"},
            "uniqueItems": False,
            "maxItems": 2,
        },
        {
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "null"},
            "maxProperties": 1,
            **OBJECT,
        },
        {**_having(a=INTEGER), "patternProperties": {"^a$": {"maximum": 5}}, "additionalProperties": False},
        {
            **_having(ab=INTEGER),
            "patternProperties": {"^a": {"minimum": 3}},
            "required": ["ab"],
            "maxProperties": 2,
        },
        {"oneOf": [{**_having(t={"const": 1}), "required": ["t"]}, _having(t={"const": 2})]},
        {"oneOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}], "$defs": {"a/b": {"type": "boolean"}}},
        {"const": {"format": "path", "uniqueItems": False}},
        {**_having(format={"enum": ["path"]}, uniqueItems={"type": "null"}), "required": ["format"]},
    ],
    ids=str,
)
def test_answers_satisfy_what_was_sent(schema: dict[str, Any]) -> None:
    found = answers(schema)
    assert found
    for answer in found:
        jsonschema.Draft202012Validator(schema).validate(answer)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"if": {"type": "object"}, "then": {}}, '"if", "then"'),
        ({"type": "string", "pattern": "^(?=a)b"}, "looks ahead or behind"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is supported where"),
        ({"type": "object", "patternProperties": {"^a": {}, "^ab": {}}}, "not disjoint"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(UnfitConstraintError) as caught:
        make_matcher(BYTES, Constraint("json_schema", json.dumps(schema)))
    assert words in str(caught.value)


def test_formats_are_those_that_llguidance_has() -> None:
    for name in [*sorted(FORMATS), "path", "password", "regex", "uri-reference", "int64"]:
        schema = json.dumps({"type": "string", "format": name})
        matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        assert matcher.is_error() == (name not in FORMATS), name


def test_what_is_sent_stays_as_it_is() -> None:
    schema = {"anyOf": [{"type": "string", "format": "x"}], "properties": {"a": {"uniqueItems": False}}}
    before = json.dumps(schema)
    assert obeyed_schema(schema) != schema
    assert json.dumps(schema) == before


SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "maximum": 99}, "kind": {"enum": ["ship", "lamp"]}},
    "required": ["count", "kind"],
    "additionalProperties": False,
}
TOOLS = (Tool("look", "Looks.", json.dumps(SCHEMA)), Tool("go"))
SCHEMAS = {"look": SCHEMA, "go": {"type": "object", "maxProperties": 0}}


class Model:
    """A tokenizer with its vocabulary."""

    def __init__(self, folder: Path, template: str) -> None:
        path = write_chat_tokenizer(folder, template)
        size = len(json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]) + 8
        self.tokenizer: Tokenizer = load_tokenizer(resolve_model(str(path)))
        source = VocabularySource(self.tokenizer.definition(), size, list(self.tokenizer.eos_ids))
        self.vocabulary: LLTokenizer = source.make()

    def matcher(self, tools: tuple[Tool, ...] = TOOLS, *, forced: bool, several: bool = True) -> LLMatcher:
        syntax = self.tokenizer.call_syntax
        assert syntax is not None
        constraint = call_constraint(
            syntax,
            tools,
            forced=forced,
            several=several,
            hidden=self.tokenizer.hidden,
            ends=self.tokenizer.eos_ids,
        )
        return make_matcher(self.vocabulary, constraint)

    def draw(self, matcher: LLMatcher, begun: list[int], seed: int, most: int = 120) -> tuple[str, bool]:
        """A text that obeys the grammar, and whether nothing may follow."""
        choice, ids = random.Random(seed), list(begun)
        for id_ in begun:
            assert matcher.consume_token(id_)
        while len(ids) < most and not matcher.is_stopped():
            ids.append(choice.choice(allowed_tokens(matcher)))
            assert matcher.consume_token(ids[-1])
        return self.tokenizer.decode(ids, self.tokenizer.hidden.values()), matcher.is_stopped()

    def calls(self, text: str, *, forced: bool) -> tuple[str, list[tuple[str, str]]]:
        """What is said, and calls, as a client gets them."""
        syntax = self.tokenizer.call_syntax
        assert syntax is not None
        reader = CallReader(syntax, forced=forced)
        said, parts = reader.push(text.replace("<|im_end|>", ""))
        found: list[list[str]] = []
        for part in parts:
            if part.name:
                found.append([part.name, ""])
            found[part.index][1] += part.arguments
        return said + reader.flush(), [(name, arguments) for name, arguments in found]


@pytest.fixture(scope="module", params=[WITH_TOOLS, MARKED], ids=["words", "special token"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("calls"), request.param)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("several", [True, False])
def test_forced_calls_validate(model: Model, seed: int, several: bool) -> None:
    text, ended = model.draw(model.matcher(forced=True, several=several), [], seed)
    said, calls = model.calls(text, forced=True)
    assert not said
    assert several or (ended and len(calls) == 1)
    finished = [call for call in calls if call[1].endswith("}")]
    assert finished
    for name, arguments in finished:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def begun(model: Model) -> list[int]:
    """A text that goes on with the mark of a call."""
    words, hidden = model.tokenizer.encode("Well then, "), model.tokenizer.hidden
    if model.tokenizer.call_syntax is not None and model.tokenizer.call_syntax.open.startswith("<repo_name>"):
        return [*words, hidden["<repo_name>"]]
    return [*words, *model.tokenizer.encode("<tool_call>")]


def test_calls_may_follow_text(model: Model) -> None:
    """Those of strict tools validate, those of others are any objects."""
    strict = (Tool("look", "Looks.", json.dumps(SCHEMA), strict=True),)
    text, ended = model.draw(model.matcher(strict, forced=False, several=False), begun(model), 1)
    said, ((name, arguments),) = model.calls(text, forced=False)
    assert (said, name, ended) == ("Well then,", "look", True)
    jsonschema.validate(json.loads(arguments), SCHEMA)
    matcher = model.matcher((Tool("look", "Looks.", json.dumps(SCHEMA)),), forced=False)
    assert model.tokenizer.call_syntax is not None
    rest = model.tokenizer.call_syntax.open.removeprefix("<repo_name>").removeprefix("<tool_call>")
    middle = model.tokenizer.call_syntax.middle
    for id_ in [*begun(model), *model.tokenizer.encode(rest + "look" + middle + '{"other": [1]}')]:
        assert matcher.consume_token(id_)


def test_there_may_be_text_alone(model: Model) -> None:
    matcher = model.matcher(forced=False)
    ids = model.tokenizer.encode("Well <tool then, {}\n\n")
    for id_ in [*ids, model.tokenizer.hidden["<file_sep>"], *ids, model.tokenizer.eos_ids[0]]:
        assert matcher.consume_token(id_)
    assert matcher.is_stopped()


def test_arguments_have_the_properties_that_are_listed_alone(model: Model) -> None:
    """Unless the schema says of others, or composes."""
    listed: dict[str, Any] = {"properties": {"in": {"type": "object", "properties": {"a": {"type": "null"}}}}}
    syntax = model.tokenizer.call_syntax
    assert syntax is not None

    def may(schema: dict[str, Any], arguments: str) -> bool:
        matcher = model.matcher((Tool("look", "", json.dumps(schema)),), forced=True)
        opened = [model.tokenizer.hidden.get("<repo_name>")] if syntax.open.startswith("<repo_name>") else []
        words = syntax.open.removeprefix("<repo_name>") + "look" + syntax.middle + arguments
        return all(matcher.consume_token(id_) for id_ in [*opened, *model.tokenizer.encode(words)])

    assert may(listed, '{"in": {"a": null}}')
    assert not may(listed, '{"in": {"b": 1}}')
    assert not may(listed, '{"out": 1}')
    assert may({**listed, "additionalProperties": True}, '{"out": 1}')
    assert may({"anyOf": [listed, {"type": "object"}]}, '{"out": 1}')


def test_arguments_that_are_no_objects_are_refused(model: Model) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"tools\[0\].parameters.type: found \"string\", expected object"
    ):
        model.matcher((Tool("look", "", '{"type": "string"}'),), forced=True)
