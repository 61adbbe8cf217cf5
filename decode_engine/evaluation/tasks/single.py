"""Task `single`: one fact in a long text, asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decode_engine.evaluation.tasks.facts import Fact, make_facts, random_statement
from decode_engine.evaluation.tasks.family import Asked, Draft, Family, places_of


def draft_single(rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int) -> Draft:
    """Facts to ask for, and distractors that share the attribute or the name with one of them."""
    return ask_each(rng, make_facts(rng, words, questions, distractors), questions)


def ask_each(rng: np.random.Generator, facts: Sequence[Fact], asked: int) -> Draft:
    """All facts in random order and wording, with a question about each of the first `asked`."""
    statements = [random_statement(rng, fact) for fact in facts]
    order = rng.permutation(len(facts))
    places = places_of(order)
    return Draft(
        tuple(statements[i] for i in order),
        tuple(
            Asked(fact.question, fact.opening, fact.value, (place,))
            for fact, place in zip(facts[:asked], places, strict=False)
        ),
    )


SINGLE = Family("single", "one fact among unrelated ones", draft_single)
