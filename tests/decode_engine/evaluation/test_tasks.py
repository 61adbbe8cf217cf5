"""Documents have the wanted length, hold their facts where they say, and are the same for the same seed."""

from __future__ import annotations

import re
from collections import Counter
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from decode_engine.evaluation.tasks.documents import (
    DocumentSet,
    Encoder,
    Question,
    chat_question,
    held_out_text,
    held_out_words,
    make_document,
    make_documents,
    parse_length,
    source_text,
)
from decode_engine.evaluation.tasks.family import (
    ANSWER_END,
    AT_ONCE,
    ATTRIBUTES,
    FAMILIES,
    FREQUENT,
    LINKS,
    PROMPT,
    VALUES,
    get_family,
    make_facts,
)
from index_store.errors import InvalidArgumentError
from tests.support.devices import crossed


class Bytes:
    """One token per byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Words:
    """One token per word, digit, punctuation mark or run of spaces: no two neighbouring lengths are alike."""

    def encode(self, text: str) -> list[int]:
        return [len(piece) for piece in re.findall(r" ?[^\W\d]+|\d| ?[^\w\s]|\s+", text)]


class Marked:
    """Like tokenizers that put a mark before every text: the pieces of a text have more tokens than the whole."""

    def encode(self, text: str) -> list[int]:
        return [0, *Words().encode(text)]


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


ENCODERS = {"bytes": Bytes(), "words": Words(), "marked": Marked(), "reader": ReaderTokens()}


@crossed({"family": FAMILIES, "tokens_by": ENCODERS})
def test_every_family_fills_its_length_and_names_where_the_evidence_stands(
    family: str, tokens_by: str, novels: str
) -> None:
    encoder = ENCODERS[tokens_by]
    tokens = 12_000 if isinstance(encoder, Bytes) else 6000
    document = make_document(encoder, novels, tokens, facts=3, seed=5, family=family)
    assert len(encoder.encode(document.text)) == document.token_count == tokens
    assert document.family == family
    assert len(document.questions) == 3
    places = _sentence_places(encoder, document.text)
    for question in document.questions:
        if family == "sentences":  # whose statements are all of one kind each
            places |= {len(encoder.encode(document.text[: document.text.index(f" {question.opening} ")]))}
        assert question.family == family
        assert question.prompt == f"\nQuestion: {question.question}\nAnswer: {question.opening}"
        assert question.token == min(question.evidence)
        assert question.depth == question.token / tokens
        assert len(set(question.evidence)) == len(question.evidence)
        for place in question.evidence:
            assert place in places, "no statement begins there"


def _sentence_places(encoder: Encoder, text: str) -> set[int]:
    """Token positions at which a statement begins."""
    openings = " (?:The|Remember that the|Note: the|It was written down that the) "
    kinds = "|".join([*(f"{attribute} of" for attribute in ATTRIBUTES), "variable ", "list of"])
    starts = [found.start() for found in re.finditer(f"{openings}(?:{kinds})", text)]
    return {len(encoder.encode(text[:start])) for start in starts}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_follows_from_the_seed(family: str, novels: str) -> None:
    first, again, other = (
        make_document(Words(), novels, 6000, facts=3, seed=seed, family=family) for seed in (7, 7, 8)
    )
    assert first == again
    assert first.questions != other.questions


def test_near_misses_differ_in_one_word(novels: str) -> None:
    document = make_document(Words(), novels, 6000, facts=4, seed=2, family="keys")
    stated = _stated(document.text)
    assert len(stated) == 4 * (1 + FAMILIES["keys"].distractors)
    for question in document.questions:
        attribute, name = _subject(question.question)
        assert stated.pop((attribute, name)) == question.answer
        assert question.prompt == PROMPT.format(attribute=attribute, name=name)
    asked = [_subject(question.question) for question in document.questions]
    for attribute, name in stated:
        assert any(_is_near((attribute, name), other) for other in asked)


def _stated(text: str) -> dict[tuple[str, str], str]:
    found = re.findall(f"he ({'|'.join(ATTRIBUTES)}) of the ([a-z ]+) is ([a-z0-9 ]+)\\.", text)
    return {(attribute, name): value for attribute, name, value in found}


def _subject(question: str) -> tuple[str, str]:
    attribute, _, name = question.removeprefix("What is the ").removesuffix("?").partition(" of the ")
    return attribute, name


def _is_near(one: tuple[str, str], other: tuple[str, str]) -> bool:
    if one[1] == other[1]:
        return one[0] != other[0]
    words, others = one[1].split(), other[1].split()
    return one[0] == other[0] and len(words) == len(others) and sum(map(str.__ne__, words, others)) == 1


def test_values_are_listed_in_order_of_appearance(novels: str) -> None:
    document = make_document(Words(), novels, 6000, facts=3, seed=1, family="values")
    for question in document.questions:
        attribute, name = re.findall(r"values of the (.+) of the (.+), in order", question.question)[0]
        found = re.findall(f"he {attribute} of the {name} is ([a-z0-9 ]+)\\.", document.text)
        assert question.answer.split(", ") == found
        assert len(set(found)) == VALUES == len(question.evidence)
        assert list(question.evidence) == sorted(question.evidence)


def test_questions_of_one_prompt_are_answered_in_turn(novels: str) -> None:
    document = make_document(Words(), novels, 6000, facts=5, seed=1, family="questions")
    stated = _stated(document.text)
    assert len(stated) == 5
    for question in document.questions:
        subjects = [_subject(part + "?") for part in question.question.removesuffix("?").split("? ")]
        assert len(set(subjects)) == AT_ONCE
        sentences = [f"The {subject[0]} of the {subject[1]} is {stated[subject]}" for subject in subjects]
        assert f"{question.opening} {question.answer}" == ". ".join(sentences)
    alone = make_document(Words(), novels, 6000, facts=1, seed=1, family="questions")
    assert len(_stated(alone.text)) == AT_ONCE


def test_chains_lead_from_the_value_to_the_last_variable(novels: str) -> None:
    document = make_document(Words(), novels, 6000, facts=6, seed=4, family="chain", distractors=3)
    values = dict(re.findall(r" The variable (\w+) is (\d+)\.", document.text))
    copies = re.findall(r" The variable (\w+) equals the variable (\w+)\.", document.text)
    assert len(values) == 6 + 3
    assert len(copies) == 6 * (LINKS - 1)
    for name, other in copies:  # every variable is set before it is copied
        values[name] = values[other]
    kinds = set()
    for question in document.questions:
        if found := re.findall(r"value of the variable (\w+)", question.question):
            kinds.add("value")
            assert values[found[0]] == question.answer
        else:
            kinds.add("variables")
            (value,) = re.findall(r"hold (\d+),", question.question)
            assert question.answer.split(", ") == [name for name, held in values.items() if held == value]
        assert len(question.evidence) == LINKS
    assert kinds == {"value", "variables"}


def test_frequent_words_are_the_most_frequent(novels: str) -> None:
    document = make_document(Words(), novels, 6000, facts=3, seed=4, family="words", distractors=2)
    lists = re.findall(r" The list of the ([a-z ]+) has ([a-z, ]+)\.", document.text)
    assert len({name for name, _ in lists}) == 5
    for question in document.questions:
        (name,) = re.findall(r"list of the ([a-z ]+) have most", question.question)
        words = [word for owner, part in lists if owner == name for word in part.split(", ")]
        counted = Counter(words).most_common()
        assert [word for word, _ in counted[:3]] == question.answer.split(", ")
        assert tuple(count for _, count in counted[:3]) == FREQUENT
        assert counted[3][1] < FREQUENT[-1]


def test_a_document_asks_no_more_than_it_has_room_for() -> None:
    assert get_family("single").questions_in(8192, 24) == 24
    assert get_family("words").questions_in(8192, 24) == 8
    assert get_family("words").questions_in(500, 24) == 1
    with pytest.raises(InvalidArgumentError, match="task is 'riddles', expected one of single, keys"):
        get_family("riddles")


def test_several_families_share_the_text(novels: str) -> None:
    parts = [
        DocumentSet(2, 4, "single"),
        DocumentSet(1, 2, "words", distractors=1),
        DocumentSet(1, 3, "chain"),
    ]
    documents = make_documents(ReaderTokens(), novels, 2048, parts, seed=0, spare=500)
    assert [document.family for document in documents] == ["single", "single", "words", "chain"]
    assert [len(document.questions) for document in documents] == [4, 4, 2, 3]
    ends = [len(novels) - len(document.continuation) for document in documents]
    lengths = [len(document.text) for document in documents]
    assert all(end < later - length for end, later, length in zip(ends, ends[1:], lengths[1:], strict=False))


@pytest.mark.parametrize(
    ("turn", "begun"),
    [
        ("\nQuestion: Who?\nAnswer:", " It is"),
        ("<|user|>Who?<|end|>\n<|assistant|>\n", "It is"),
        ("<user>Who?<model>", "It is"),
        ("[INST] Who? [/INST]", " It is"),
    ],
)
def test_a_chat_question_is_worded_by_the_template_and_opens_the_answer(turn: str, begun: str) -> None:
    question = Question("Who?", "Jude", "", token=3, depth=0.1, opening="It is", evidence=(3,))
    asked = chat_question(question, turn)
    assert asked.prompt == begun
    assert asked.ending == "."
    assert question.ending == ANSWER_END
    assert (asked.answer, asked.evidence) == (question.answer, question.evidence)


def test_texts_are_joined_in_order(tmp_path: Path) -> None:
    for name, text in (("b", "Zweitens: \u00fcber.\n"), ("a", "First.")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert source_text([tmp_path / "b", tmp_path / "a"]) == "Zweitens: \u00fcber.\n\n\nFirst."
    (tmp_path / "c").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgumentError, match="c is not UTF-8 text: byte 0"):
        source_text([tmp_path / "a", tmp_path / "c"])


def test_lengths() -> None:
    assert [parse_length(text) for text in ("8192", "8k", " 32K ")] == [8192, 8192, 32768]
    for text in ("", "0", "8m", "-1", "1.5k"):
        with pytest.raises(InvalidArgumentError, match="expected a number of tokens"):
            parse_length(text)


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
    documents = make_documents(ReaderTokens(), novels, 2048, [DocumentSet(9, 3)], seed=0, spare=500)
    starts = [novels.find(document.text[:60]) for document in documents]
    ends = [len(novels) - len(document.continuation) for document in documents]
    assert all(start >= 0 for start in starts)
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_documents_that_overlap_are_of_one_stretch(novels: str) -> None:
    sets = [DocumentSet(4, 3)]
    apart = make_documents(ReaderTokens(), novels, 2048, sets, seed=0, spare=500)
    assert [document.stretch for document in apart] == [0, 1, 2, 3]
    (one,) = make_documents(ReaderTokens(), novels, 2048, [DocumentSet(1, 3)], seed=0)
    shorter = novels[: 3 * len(one.text)]
    crowded = make_documents(ReaderTokens(), shorter, 2048, sets, seed=0, spare=500)
    assert [document.stretch for document in crowded] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 4096, "facts": 3, "questions": 4}, "4 questions about 3 facts"),
        ({"tokens": 4096, "facts": 0}, "0 questions about 0 facts"),
        ({"tokens": 3000, "facts": 20}, "20 facts of task 'single' take"),
        ({"tokens": 100_000, "facts": 3}, "longer text"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: dict[str, int], message: str, novels: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make_document(Bytes(), novels[:50_000], seed=0, **arguments)


def test_a_text_shorter_than_one_context_is_refused(novels: str) -> None:
    with pytest.raises(InvalidArgumentError, match="longer text"):
        make_documents(Bytes(), novels[:3000], 4096, [DocumentSet(1, 2)], seed=0)
