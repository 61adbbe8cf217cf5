"""Task `values`: all values of one attribute of one name, stated at different depths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decode_engine.evaluation.tasks.facts import Fact, make_facts, random_statement, random_value
from decode_engine.evaluation.tasks.family import LIST_SEPARATOR, Asked, Draft, Family, places_of

if TYPE_CHECKING:
    import numpy as np

VALUES = 4
QUESTION = "What are all values of the {attribute} of the {name}, in order of appearance?"


def draft_values(rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int) -> Draft:
    """VALUES statements for every question; the answer lists their values in the order of the text."""
    drawn = make_facts(rng, words, questions, distractors)
    subjects, others = drawn[:questions], drawn[questions:]
    facts = [
        Fact(subject.attribute, subject.name, value)
        for subject in subjects
        for value in _distinct_values(rng, words)
    ]
    statements = [random_statement(rng, fact) for fact in [*facts, *others]]
    order = rng.permutation(len(statements))
    places = places_of(order)
    asked = []
    for number, subject in enumerate(subjects):
        own = sorted(range(number * VALUES, (number + 1) * VALUES), key=places.__getitem__)
        asked.append(
            Asked(
                QUESTION.format(attribute=subject.attribute, name=subject.name),
                subject.opening,
                LIST_SEPARATOR.join(facts[i].value for i in own),
                tuple(places[i] for i in own),
            )
        )
    return Draft(tuple(statements[i] for i in order), tuple(asked))


def _distinct_values(rng: np.random.Generator, words: Sequence[str]) -> list[str]:
    values: list[str] = []
    while len(values) < VALUES:
        value = random_value(rng, words)
        if value not in values:
            values.append(value)
    return values


VALUES_FAMILY = Family(
    "values",
    f"all {VALUES} values that one attribute of one name has, in order",
    draft_values,
    tokens_per_question=256,
)
