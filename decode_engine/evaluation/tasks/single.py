"""Tasks `single`, one fact in a long text, asked for, and `questions`, several of them in one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decode_engine.evaluation.tasks.facts import Fact, make_facts, random_statement
from decode_engine.evaluation.tasks.family import Asked, Draft, Family, places_of

if TYPE_CHECKING:
    import numpy as np


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

AT_ONCE = 3


def draft_questions(
    rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int
) -> Draft:
    """As many facts as questions (AT_ONCE at least); every prompt asks for AT_ONCE of them, in random order.

    Each fact leads one prompt; the others of a prompt are drawn from all.
    """
    single = draft_single(rng, words, max(questions, AT_ONCE), distractors)
    asked = []
    for number in range(questions):
        others = [i for i in range(len(single.asked)) if i != number]
        chosen = [number, *(int(i) for i in rng.choice(others, AT_ONCE - 1, replace=False))]
        asked.append(_together([single.asked[i] for i in chosen]))
    return Draft(single.statements, tuple(asked))


def _together(asked: Sequence[Asked]) -> Asked:
    first, *rest = asked
    return Asked(
        " ".join(one.question for one in asked),
        first.opening,
        ". ".join([first.answer, *(f"{one.opening} {one.answer}" for one in rest)]),
        tuple(place for one in asked for place in one.evidence),
    )


QUESTIONS = Family(
    "questions", f"{AT_ONCE} facts asked for in one prompt, answered in order", draft_questions
)
