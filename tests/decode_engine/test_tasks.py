"""Documents have the wanted length, hold their facts where they say, and are the same for the same seed."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from decode_engine.evaluation.tasks import (
    ATTRIBUTES,
    Encoder,
    held_out_text,
    held_out_words,
    make_document,
    make_documents,
    make_facts,
    write_questions,
)
from index_store.errors import InvalidArgumentError


class Bytes:
    """One token per byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Words:
    """One token per word, digit, punctuation mark or run of spaces: no two neighbouring lengths are alike."""

    def encode(self, text: str) -> list[int]:
        return [len(piece) for piece in re.findall(r" ?[^\W\d]+|\d| ?[^\w\s]|\s+", text)]


class ReaderTokens:
    """The embedded reader's tokenizer."""

    def __init__(self) -> None:
        folder = files("index_store.models") / "reader"
        self._tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@pytest.fixture(scope="module")
def novels() -> str:
    return held_out_text()


@pytest.mark.parametrize("encoder", [Bytes(), Words(), ReaderTokens()], ids=["bytes", "words", "reader"])
@pytest.mark.parametrize("tokens", [1500, 4096])
def test_a_document_has_exactly_the_wanted_tokens(encoder: Encoder, tokens: int, novels: str) -> None:
    document = make_document(encoder, novels[:60_000], tokens, facts=4, seed=1)
    assert len(encoder.encode(document.text)) == document.token_count == tokens
    assert len(document.questions) == 4


def test_statements_stand_at_the_depths_that_the_questions_name(novels: str) -> None:
    encoder = ReaderTokens()
    document = make_document(encoder, novels, 4096, facts=12, seed=3)
    for number, question in enumerate(document.questions):
        before = len(encoder.encode(document.text.split(f" is {question.answer}.")[0]))
        assert 0 <= before - question.token < 40
        assert question.depth == question.token / 4096
        assert abs(question.depth - (number + 0.5) / 12) < 0.1
        statement = question.question.removeprefix("What is ").removesuffix("?") + f" is {question.answer}."
        assert document.text.lower().count(statement.lower()) == 1
        assert question.prompt.endswith(" is")
        assert question.question in question.prompt


def test_taking_the_statements_out_gives_the_source_back(novels: str) -> None:
    document = make_document(ReaderTokens(), novels, 2048, facts=5, seed=2, start=0)
    rest = document.text
    for question in document.questions:
        what = question.question.removeprefix("What is the ").removesuffix("?")
        opening = r" (?:The|Remember that the|Note: the|It was written down that the) "
        rest, found = re.subn(f"{opening}{what} is {question.answer}\\.", "", rest)
        assert found == 1
    assert novels == rest + document.continuation


def test_the_seed_decides(novels: str) -> None:
    first, again, other = (make_document(Bytes(), novels, 3000, facts=5, seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert first.questions != other.questions


def test_fewer_questions_than_facts_spread_over_the_document(novels: str) -> None:
    document = make_document(ReaderTokens(), novels, 4096, facts=20, seed=0, questions=5)
    depths = [question.depth for question in document.questions]
    assert depths == sorted(depths)
    assert depths[0] < 0.1
    assert depths[-1] > 0.85


def test_facts_are_distinct_and_distractors_resemble_the_asked_ones() -> None:
    facts = make_facts(np.random.default_rng(0), held_out_words(), count=10, distractors=40)
    assert len({(fact.attribute, fact.name) for fact in facts}) == 50
    asked = facts[:10]
    for distractor in facts[10:]:
        assert any(distractor.attribute == fact.attribute or distractor.name == fact.name for fact in asked)


def test_distractors_are_in_the_text_but_not_asked(novels: str) -> None:
    plain = make_document(ReaderTokens(), novels, 4096, facts=5, seed=4)
    crowded = make_document(ReaderTokens(), novels, 4096, facts=5, seed=4, distractors=10)
    assert len(crowded.questions) == 5
    assert {question.question for question in crowded.questions} == {
        question.question for question in plain.questions
    }

    def statements(text: str) -> int:
        return sum(text.count(f"he {attribute} of the ") for attribute in ATTRIBUTES)

    assert statements(crowded.text) >= statements(plain.text) + 9


def test_documents_of_one_length_do_not_share_text(novels: str) -> None:
    documents = make_documents(ReaderTokens(), novels, 2048, count=9, facts=3, seed=0, spare=500)
    starts = [novels.find(document.text[:60]) for document in documents]
    ends = [len(novels) - len(document.continuation) for document in documents]
    assert all(start >= 0 for start in starts)
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_nine_contexts_of_32k_fit_into_the_held_out_text() -> None:
    tokens = len(ReaderTokens().encode(held_out_text()))
    assert tokens > 9 * (32_768 + 1_000)


def test_held_out_words_are_plain_and_many() -> None:
    words = held_out_words()
    assert len(words) == len(set(words)) == 1000
    assert all(word.isalpha() and word.islower() for word in words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 4096, "facts": 3, "questions": 4}, "4 questions about 3 facts"),
        ({"tokens": 4096, "facts": 0}, "0 questions about 0 facts"),
        ({"tokens": 300, "facts": 20}, "20 facts take"),
        ({"tokens": 100_000, "facts": 3}, "longer text"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: dict[str, int], message: str, novels: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make_document(Bytes(), novels[:50_000], seed=0, **arguments)


def test_a_text_shorter_than_one_context_is_refused(novels: str) -> None:
    with pytest.raises(InvalidArgumentError, match="longer text"):
        make_documents(Bytes(), novels[:3000], 4096, count=1, facts=2, seed=0)


def test_questions_are_written_one_per_line(tmp_path: Path, novels: str) -> None:
    document = make_document(Bytes(), novels, 3000, facts=3, seed=0)
    write_questions(tmp_path / "q.jsonl", document.questions)
    lines = (tmp_path / "q.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [asdict(question) for question in document.questions]
