"""Constraints: which tokens may come, what is refused, schemas as people write them, and calls by grammar."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import jsonschema
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from pydantic import AnyUrl, BaseModel, EmailStr, Field, FilePath, SecretStr, TypeAdapter  # noqa: F401

from decode_engine.engine.sampling import constraints
from decode_engine.engine.sampling.call_grammar import call_constraint
from decode_engine.engine.sampling.constraints import (
    Trial,
    UnfitConstraintError,
    Vocabulary,
    VocabularySource,
    allowed_tokens,
    make_matcher,
    obeyed_schema,
)
from decode_engine.engine.sampling.edits import Edits, edit_logits_reference
from decode_engine.engine.sampling.grammar import Grammar, Grammars
from decode_engine.orders.order import Constraint, ConstraintKind
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.call_syntax import CallReader
from index_store.models.conversation.messages import Tool
from index_store.models.loading import Tokenizer, load_tokenizer, resolve_model
from tests.index_store.models.conversation.test_turns import MARKED
from tests.support.serving.chat import WITH_TOOLS, write_chat_tokenizer

SIZE = 8192  # the model has more than its tokenizer's 4,096


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("reader"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Iterator[Tried]:
    made = Tried(Vocabulary(lambda: VocabularySource(tokenizer.definition(), SIZE, tokenizer.eos_ids)))
    yield made
    made.close()


class Tried:
    """A vocabulary, and grammars over it of constraints that were tried, as a door and an engine have them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.grammars = Grammars(vocabulary)
        self.token_bytes = vocabulary.token_bytes

    def compile(self, constraint: Constraint) -> Grammar:
        self.vocabulary.check(constraint)
        return self.grammars.compile(constraint)

    def close(self) -> None:
        self.grammars.close()
        self.vocabulary.close()


@pytest.fixture
def trials(tokenizer: Tokenizer) -> Iterator[Trial]:
    made = Trial(lambda: VocabularySource(tokenizer.definition(), SIZE, tokenizer.eos_ids))
    yield made
    made.close()


def answer(vocabulary: Tried, constraint: Constraint, seed: int) -> tuple[bytes, bool]:
    """The answer of a model that says anything that it may, and whether it ended with an end token."""
    generator = torch.Generator().manual_seed(seed)
    obeyed = vocabulary.compile(constraint).start()
    said = b""
    while not obeyed.ended:
        edits = [Edits(allowed_W=obeyed.allowed())]
        logits = edit_logits_reference(torch.randn(1, SIZE, generator=generator), edits)
        token = int(logits.argmax())
        obeyed.take(token)
        if token == 0:
            return said, True
        said += vocabulary.token_bytes[token]
    return said, False


@pytest.mark.parametrize(
    ("kind", "text", "ends"),
    [
        ("choices", json.dumps(["yes", "yesterday", "nö"]), {b"yes", b"yesterday", "nö".encode()}),
        ("regex", "[01]{2}", {b"00", b"01", b"10", b"11"}),
        ("json_schema", '{"type": "boolean"}', {b"true", b"false"}),
    ],
)
def test_answers_are_those_that_are_allowed_and_end_by_themselves(
    vocabulary: Tried, kind: ConstraintKind, text: str, ends: set[bytes]
) -> None:
    found = {answer(vocabulary, Constraint(kind, text), seed)[0] for seed in range(24)}
    assert found <= ends
    assert len(found) > 1


def test_where_more_might_follow_an_end_token_is_allowed(vocabulary: Tried) -> None:
    constraint = Constraint("regex", "a+")
    assert any(answer(vocabulary, constraint, seed)[1] for seed in range(8))


def test_answers_to_one_grammar_go_on_apart_also_at_once(vocabulary: Tried) -> None:
    grammar = vocabulary.compile(Constraint("regex", "[0-9]{40}"))
    assert vocabulary.compile(Constraint("regex", "[0-9]{40}")) is grammar
    lengths: list[int] = []

    def run(seed: int) -> None:
        said, _ = answer(vocabulary, Constraint("regex", "[0-9]{40}"), seed)
        lengths.append(len(said))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [40] * 6


def test_tokens_that_may_not_come_are_refused(vocabulary: Tried, tokenizer: Tokenizer) -> None:
    obeyed = vocabulary.compile(Constraint("regex", "[0-9]{3}")).start()
    [letter] = tokenizer.encode("a")
    [logits_V] = edit_logits_reference(torch.zeros(1, SIZE), [Edits(allowed_W=obeyed.allowed())])
    assert logits_V[letter] == -torch.inf
    assert logits_V[0] == -torch.inf, "no end before it is whole"
    with pytest.raises(InvalidArgumentError, match=r"any more: .*satisfy the grammar"):
        obeyed.take(letter)


def test_what_is_too_much_only_behind_a_token_is_refused_before_the_answer(vocabulary: Tried) -> None:
    """All 800 properties may follow a brace, each with a pattern of its own."""
    names = {f"p{size}": {"type": "string", "pattern": f"^(a|b){{{size}}}$"} for size in range(800)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    with pytest.raises(InvalidArgumentError, match=r"cannot be obeyed: .* items; max is"):
        vocabulary.compile(Constraint("json_schema", json.dumps(schema)))


def test_what_dies_in_its_trial_is_refused_and_the_next_one_is_tried(
    vocabulary: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = Constraint("json_schema", '{"type": "integer", "multipleOf": 99999989}')
    with monkeypatch.context() as patch:
        patch.setattr(constraints, "_TRIAL_S", 2.0)
        with pytest.raises(InvalidArgumentError, match="json_schema cannot be obeyed: it is too complex"):
            vocabulary.compile(hostile)
    assert answer(vocabulary, Constraint("regex", "after"), 0)[0] == b"after"


def test_a_trial_reads_answers_also_where_many_files_are_open(trials: Trial) -> None:
    trials.check(Constraint("regex", "a"))
    process = trials._process
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, 2048), most))
    try:
        with process.stdout as low:
            process.stdout = os.fdopen(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024), "rb")
        trials.check(Constraint("regex", "b"))
    finally:
        trials.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_an_answer_that_was_not_read_is_not_taken_for_the_next_one(
    trials: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(24, "Too many open files")

    trials.check(Constraint("regex", "a"))
    with monkeypatch.context() as patch:
        patch.setattr(constraints, "DefaultSelector", fail)
        with pytest.raises(OSError, match="Too many open files"):
            trials.check(Constraint("regex", "("))
    trials.check(Constraint("regex", "a"))


def test_who_waits_for_a_core_is_not_too_complex(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time in which nothing is computed says nothing about a constraint."""

    def wait_first(matcher: LLMatcher) -> Sequence[int]:
        time.sleep(1.5 * constraints._SLOWEST_MASK_S)
        return allowed_tokens(matcher)

    monkeypatch.setattr(constraints, "allowed_tokens", wait_first)
    source = VocabularySource(tokenizer.definition(), SIZE, tokenizer.eos_ids)
    assert constraints._try(source.make(), Constraint("regex", "[ab]")) == ""


def test_bytes_of_tokens_are_those_of_the_text(vocabulary: Tried, tokenizer: Tokenizer) -> None:
    text = "Ein Hafen: „hören“, 灯, and the end.\n"
    assert b"".join(vocabulary.token_bytes[token] for token in tokenizer.encode(text)).decode() == text


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
        ({"$ref": "http://example.com/schema"}, "http://example.com/schema"),  # which nobody fetches
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

    def matcher(
        self,
        tools: tuple[Tool, ...] = TOOLS,
        *,
        forced: bool,
        several: bool = True,
        answer: Constraint | None = None,
    ) -> LLMatcher:
        syntax = self.tokenizer.call_syntax
        constraint = call_constraint(
            syntax,
            tools,
            forced=forced,
            several=several,
            hidden=self.tokenizer.hidden,
            ends=self.tokenizer.eos_ids,
            answer=answer,
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


def test_an_answer_is_calls_or_what_its_schema_says(model: Model) -> None:
    answer, syntax, encode = (
        Constraint("json_schema", json.dumps(SCHEMA)),
        model.tokenizer.call_syntax,
        model.tokenizer.encode,
    )
    rest = syntax.open.removeprefix("<repo_name>")
    mark = [model.tokenizer.hidden["<repo_name>"]] if rest != syntax.open else []
    called = [*mark, *encode(rest + "look" + syntax.middle + '{"other": 1}')]
    for ids in (encode('{"count": 5, "kind": "lamp"}'), called):
        matcher = model.matcher(forced=False, answer=answer)
        assert all(matcher.consume_token(id_) for id_ in ids)
    matcher = model.matcher(forced=False, answer=answer)
    assert not all(matcher.consume_token(id_) for id_ in encode("Well then"))
    with pytest.raises(InvalidArgumentError, match="begin as JSON does"):
        call_constraint(
            replace(syntax, open='{"name": "'), TOOLS, forced=False, several=False, hidden={}, answer=answer
        )


def test_arguments_have_the_properties_that_are_listed_alone(model: Model) -> None:
    """Unless the schema says of others, or composes."""
    listed: dict[str, Any] = {"properties": {"in": {"type": "object", "properties": {"a": {"type": "null"}}}}}
    syntax = model.tokenizer.call_syntax

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
