"""Facts of the form "The access code of the silver falcon is 48213": wording and random generation.

The wording is the one the embedded reader was trained with, the words of names and values are others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


ATTRIBUTES = (
    "access code",
    "serial number",
    "secret word",
    "phone number",
    "magic number",
    "password",
    "room number",
    "owner",
    "price",
    "favourite colour",
    "address",
    "birthplace",
)
STATEMENTS = (
    " The {attribute} of the {name} is {value}.",
    " Remember that the {attribute} of the {name} is {value}.",
    " Note: the {attribute} of the {name} is {value}.",
    " It was written down that the {attribute} of the {name} is {value}.",
)
QUESTION = "What is the {attribute} of the {name}?"
OPENING = "The {attribute} of the {name} is"
PROMPT = f"\nQuestion: {QUESTION}\nAnswer: {OPENING}"


@dataclass(frozen=True, slots=True)
class Fact:
    """The `attribute` of the `name` is `value`."""

    attribute: str
    name: str
    value: str

    def statement(self, template: str) -> str:
        """The sentence that is put into the text."""
        return template.format(attribute=self.attribute, name=self.name, value=self.value)

    @property
    def question(self) -> str:
        """What asks for the value."""
        return QUESTION.format(attribute=self.attribute, name=self.name)

    @property
    def opening(self) -> str:
        """What an answer begins with."""
        return OPENING.format(attribute=self.attribute, name=self.name)


def random_statement(rng: np.random.Generator, fact: Fact) -> str:
    """The fact in one of the wordings."""
    return fact.statement(STATEMENTS[int(rng.integers(len(STATEMENTS)))])


def random_phrase(rng: np.random.Generator, words: Sequence[str], least: int = 1, most: int = 3) -> str:
    """`least` to `most` words."""
    return " ".join(words[i] for i in rng.integers(0, len(words), int(rng.integers(least, most + 1))))


def random_attribute(rng: np.random.Generator) -> str:
    """One of ATTRIBUTES."""
    return ATTRIBUTES[int(rng.integers(len(ATTRIBUTES)))]


def random_number(rng: np.random.Generator) -> str:
    """Four to seven digits."""
    return "".join(str(d) for d in rng.integers(0, 10, int(rng.integers(4, 8))))


def random_value(rng: np.random.Generator, words: Sequence[str]) -> str:
    """A number six times in ten, one to three words otherwise."""
    return random_number(rng) if rng.random() < 0.6 else random_phrase(rng, words)


def random_fact(rng: np.random.Generator, words: Sequence[str]) -> Fact:
    """A fact whose name has one to three words."""
    name, attribute = random_phrase(rng, words), random_attribute(rng)
    return Fact(attribute, name, random_value(rng, words))


def make_facts(
    rng: np.random.Generator, words: Sequence[str], count: int, distractors: int = 0
) -> list[Fact]:
    """`count` facts to ask about, then `distractors` that share an attribute or a name with one of them.

    No two facts state the same attribute of the same name.
    """
    facts: list[Fact] = []
    taken: set[tuple[str, str]] = set()
    while len(facts) < count + distractors:
        fact = random_fact(rng, words)
        if len(facts) >= count:
            near = facts[int(rng.integers(count))]
            fact = (
                Fact(near.attribute, fact.name, fact.value)
                if rng.random() < 0.5
                else Fact(fact.attribute, near.name, fact.value)
            )
        if (fact.attribute, fact.name) not in taken:
            taken.add((fact.attribute, fact.name))
            facts.append(fact)
    return facts
