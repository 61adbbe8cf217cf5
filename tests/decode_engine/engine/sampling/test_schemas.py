"""Schemas as pydantic, zod and people write them: what is obeyed satisfies what was sent."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, Optional

import jsonschema
import pytest
from llguidance import LLTokenizer
from pydantic import AnyUrl, BaseModel, EmailStr, Field, FilePath, SecretStr, TypeAdapter  # noqa: F401

from decode_engine.engine.sampling.constraints import (
    Constraint,
    UnfitConstraintError,
    allowed_tokens,
    make_matcher,
    obeyed_schema,
)

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


@pytest.mark.parametrize("name", ["date-time", "email", "uuid", "ipv4", "path", "int64"])
@pytest.mark.parametrize("kind", ["string", ["string", "null"]])
def test_formats_are_annotations(name: str, kind: Any) -> None:
    inner = {"type": kind, "format": name}
    schema = {"anyOf": [{"type": "array", "prefixItems": [inner], "items": inner}, {"$ref": "#/$defs/a"}]}
    matcher = make_matcher(BYTES, Constraint("json_schema", json.dumps({**schema, "$defs": {"a": inner}})))
    assert all(matcher.consume_token(byte) for byte in b'["soon","x"]')
    assert matcher.is_accepting()


def test_what_is_sent_stays_as_it_is() -> None:
    schema = {"anyOf": [{"type": "string", "format": "x"}], "properties": {"a": {"uniqueItems": False}}}
    before = json.dumps(schema)
    assert obeyed_schema(schema) != schema
    assert json.dumps(schema) == before
