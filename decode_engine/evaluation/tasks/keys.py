"""Task `keys`: a fact among others that differ from it in one word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decode_engine.evaluation.tasks.facts import Fact, random_attribute, random_phrase, random_value
from decode_engine.evaluation.tasks.family import Draft, Family
from decode_engine.evaluation.tasks.single import ask_each

if TYPE_CHECKING:
    import numpy as np


def draft_keys(rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int) -> Draft:
    """Facts about names of two or three words, and in turn another attribute of a name or a name one word away."""
    facts: list[Fact] = []
    taken: set[tuple[str, str]] = set()

    def add(attribute: str, name: str) -> None:
        if (attribute, name) not in taken:
            taken.add((attribute, name))
            facts.append(Fact(attribute, name, random_value(rng, words)))

    while len(facts) < questions:
        add(random_attribute(rng), random_phrase(rng, words, 2, 3))
    turn = 0
    while len(facts) < questions + distractors:
        near = facts[turn // 2 % questions]
        if turn % 2:
            add(random_attribute(rng), near.name)
        else:
            add(near.attribute, _one_word_away(rng, words, near.name))
        turn += 1
    return ask_each(rng, facts, questions)


def _one_word_away(rng: np.random.Generator, words: Sequence[str], name: str) -> str:
    parts = name.split()
    parts[int(rng.integers(len(parts)))] = words[int(rng.integers(len(words)))]
    return " ".join(parts)


KEYS = Family(
    "keys",
    "one fact among near misses: other attributes of the same name, and names that differ in one word",
    draft_keys,
    distractors=3,
    tokens_per_question=256,
)
