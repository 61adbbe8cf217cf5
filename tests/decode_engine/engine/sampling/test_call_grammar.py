"""Calls by grammar: whatever is drawn, finished calls are of known tools, with arguments that validate."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from decode_engine.engine.sampling.call_grammar import call_constraint
from decode_engine.engine.sampling.matching import allowed_tokens, make_matcher
from decode_engine.engine.sampling.trial import VocabularySource
from decode_engine.orders.order import Constraint
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.call_syntax import CallReader
from index_store.models.conversation.messages import Tool
from index_store.models.loading import resolve_model
from index_store.models.tokenizer import Tokenizer, load_tokenizer
from tests.index_store.models.conversation.test_turns import MARKED
from tests.support.serving.chat import WITH_TOOLS, write_chat_tokenizer

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
        assert syntax is not None
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


def test_an_answer_is_calls_or_what_its_schema_says(model: Model) -> None:
    answer, syntax, encode = (
        Constraint("json_schema", json.dumps(SCHEMA)),
        model.tokenizer.call_syntax,
        model.tokenizer.encode,
    )
    assert syntax is not None
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
