"""Task `chain`: variables that are set to one another, to be followed through the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decode_engine.evaluation.tasks.facts import random_number
from decode_engine.evaluation.tasks.family import LIST_SEPARATOR, Asked, Draft, Family, places_of

if TYPE_CHECKING:
    import numpy as np

LINKS = 4
SET = " The variable {name} is {value}."
COPY = " The variable {name} equals the variable {other}."


def draft_chain(rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int) -> Draft:
    """One chain of LINKS variables for every question, its links in order at different depths.

    Every other question asks for the value of the last variable, the others for all variables that hold the value.
    Distractors are chains of one variable. Names are distinct words, values are distinct numbers.
    """
    count = questions * LINKS + distractors
    names = [words[i] for i in rng.choice(len(words), count, replace=count > len(words))]
    values: list[str] = []
    while len(values) < questions + distractors:
        value = random_number(rng)
        if value not in values:
            values.append(value)
    order = rng.permutation(count)
    places = places_of(order)
    statements = [""] * count
    asked = []
    for number in range(questions):
        chain = names[number * LINKS : (number + 1) * LINKS]
        own = tuple(sorted(places[number * LINKS : (number + 1) * LINKS]))
        statements[own[0]] = SET.format(name=chain[0], value=values[number])
        for place, name, other in zip(own[1:], chain[1:], chain[:-1], strict=True):
            statements[place] = COPY.format(name=name, other=other)
        asked.append(_question(number, chain, values[number], own))
    for number in range(distractors):
        name, value = names[questions * LINKS + number], values[questions + number]
        statements[places[questions * LINKS + number]] = SET.format(name=name, value=value)
    return Draft(tuple(statements), tuple(asked))


def _question(number: int, chain: Sequence[str], value: str, places: tuple[int, ...]) -> Asked:
    if number % 2:
        return Asked(
            f"Which variables hold {value}, in order of appearance?",
            f"The variables that hold {value} are",
            LIST_SEPARATOR.join(chain),
            places,
        )
    last = chain[-1]
    return Asked(f"What is the value of the variable {last}?", f"The variable {last} is", value, places)


CHAIN = Family(
    "chain",
    f"chains of {LINKS} variables set to one another: the value of the last one, or all that hold a value",
    draft_chain,
    tokens_per_question=256,
)
