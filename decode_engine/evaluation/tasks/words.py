"""Task `words`: the made-up words that a list names most often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decode_engine.evaluation.tasks.facts import random_phrase
from decode_engine.evaluation.tasks.family import LIST_SEPARATOR, Asked, Draft, Family, places_of

if TYPE_CHECKING:
    import numpy as np

FREQUENT = (7, 5, 3)
"""How often the words that are asked for occur."""
RARE = 5
"""Further words that occur once each."""
PER_STATEMENT = 4
STATEMENT = " The list of the {name} has {words}."
QUESTION = "Which three words does the list of the {name} have most often, the most frequent one first?"
OPENING = "The list of the {name} most often has"

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def draft_words(rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int) -> Draft:
    """One list for every question and distractor, given in parts of PER_STATEMENT words all over the text."""
    statements: list[str] = []
    subjects: list[tuple[str, list[str], range]] = []
    taken: set[str] = set()
    names: set[str] = set()
    while len(subjects) < questions + distractors:
        name = random_phrase(rng, words, 2, 3)
        if name in names:
            continue
        names.add(name)
        coded = [_coded_word(rng, taken) for _ in range(len(FREQUENT) + RARE)]
        counts = [*FREQUENT, *(1 for _ in range(RARE))]
        mentions = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
        rng.shuffle(mentions)
        first = len(statements)
        for start in range(0, len(mentions), PER_STATEMENT):
            part = LIST_SEPARATOR.join(mentions[start : start + PER_STATEMENT])
            statements.append(STATEMENT.format(name=name, words=part))
        subjects.append((name, coded[: len(FREQUENT)], range(first, len(statements))))
    order = rng.permutation(len(statements))
    places = places_of(order)
    asked = [
        Asked(
            QUESTION.format(name=name),
            OPENING.format(name=name),
            LIST_SEPARATOR.join(frequent),
            tuple(sorted(places[i] for i in own)),
        )
        for name, frequent, own in subjects[:questions]
    ]
    return Draft(tuple(statements[i] for i in order), tuple(asked))


def _coded_word(rng: np.random.Generator, taken: set[str]) -> str:
    """Consonants and vowels in turn, five letters, never the same twice."""
    while True:
        letters = (
            (_CONSONANTS, _VOWELS)[place % 2][int(rng.integers((len(_CONSONANTS), len(_VOWELS))[place % 2]))]
            for place in range(5)
        )
        word = "".join(letters)
        if word not in taken:
            taken.add(word)
            return word


WORDS = Family(
    "words",
    "the three most frequent of the made-up words that a list has, its parts all over the text",
    draft_words,
    tokens_per_question=1024,
)
