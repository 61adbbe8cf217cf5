"""What a family of tasks is: statements to put into a text, and questions about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


PROMPT_FORM = "\nQuestion: {question}\nAnswer: {opening}"
ANSWER_END = ".\n"
LIST_SEPARATOR = ", "


@dataclass(frozen=True, slots=True)
class Asked:
    """A question before it is known where its evidence stands.

    opening: what an answer begins with; the right continuation is a space and `answer`. evidence: which statements
    have to be read for it, as positions in `Draft.statements`.
    """

    question: str
    opening: str
    answer: str
    evidence: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """statements: sentences, each with a leading space, in the order in which the document will hold them."""

    statements: tuple[str, ...]
    asked: tuple[Asked, ...]


class MakeDraft(Protocol):
    """Draws statements and questions.

    Everything follows from `rng`: whoever changes the order of its draws changes every document of the family.
    """

    def __call__(
        self, rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int
    ) -> Draft:
        """`questions` questions, with `distractors` statements that nobody asks about but that resemble others."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of task.

    distractors: how many there are for each question unless asked otherwise. tokens_per_question: a document asks at
    most one question for as many of its tokens, so that the statements stay a small part of it.
    """

    name: str
    summary: str
    draft: MakeDraft
    distractors: int = 0
    tokens_per_question: int = 1

    def questions_in(self, tokens: int, wanted: int) -> int:
        """How many of the wanted questions a document of that many tokens has room for, at least one."""
        return max(1, min(wanted, tokens // self.tokens_per_question))


def places_of(order: Sequence[int] | np.ndarray) -> list[int]:
    """The inverse of a permutation: where each statement went when place j holds statement order[j]."""
    places = [0] * len(order)
    for place, statement in enumerate(order):
        places[int(statement)] = place
    return places
