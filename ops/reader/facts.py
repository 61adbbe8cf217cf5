"""Training sequences: running text into which facts and questions about earlier facts are spliced.

Statements and questions are worded as the evaluation words them: a reader trained on others would be judged unfairly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from decode_engine.evaluation.tasks.family import ANSWER_END, ATTRIBUTES, PROMPT, STATEMENTS

Tokens = NDArray[np.int64]
Weights = NDArray[np.float32]

RECALL = "\nRecall:"
TRAINING_WORDS = 3000
"""Names in training are made of this many of the most frequent words; the rest is held out for evaluation."""

_ENCODING_CACHE = 200_000
_RECALL_WEIGHT = 2.0
_RECALL_FREE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Fact:
    """The `attribute` of the `name` is `value`."""

    attribute: str
    name: str
    value: str

    def about_the_same_as(self, other: Fact) -> bool:
        return (self.attribute, self.name) == (other.attribute, other.name)

    def fill(self, template: str) -> str:
        return template.format(attribute=self.attribute, name=self.name, value=self.value)


class SequenceMaker:
    """Makes training sequences from a stream of tokens and a list of words; everything follows from the seed."""

    def __init__(
        self,
        text: NDArray[np.uint16],
        words: Sequence[str],
        tokenizer: Tokenizer,
        seed: int,
        answer_weight: float = 4.0,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self._text = text
        self._words = words
        self._tokenizer = tokenizer
        self._answer_weight = answer_weight
        self._encoded: dict[str, Tokens] = {}

    def sequence(self, length: int) -> tuple[Tokens, Weights]:
        """(`length` + 1 tokens, the weight of each as a target): answers weigh more than text."""
        builder = _Builder()
        facts: list[Fact] = []
        mean_run = self.random.choice([24, 60, 160, 400])
        with_recall = self.random.random() < 0.5
        while builder.length <= length:
            builder.add(self.text(int(min(self.random.exponential(mean_run) + 1, 2000))))
            event = self.random.random()
            if not facts or event > 0.15 + 0.7 * builder.length / length:
                self._state_new_fact(builder, facts)
            elif with_recall and event < 0.08 and builder.length > 400:
                self._recall(builder)
            else:
                for _ in range(int(self.random.integers(1, 4))):
                    tokens, question_length = self.question(facts[self.random.integers(len(facts))])
                    builder.add(tokens, self._answer_weight, question_length)
        tokens, weights = builder.joined()
        return tokens[: length + 1], weights[: length + 1]

    def text(self, count: int) -> Tokens:
        """A random run of `count` tokens."""
        start = self.random.integers(0, len(self._text) - count - 1)
        return self._text[start : start + count].astype(np.int64)

    def fact(self) -> Fact:
        """A random fact; six in ten values are numbers of four to seven digits, the others one to three words."""
        name = self._some_words()
        attribute = ATTRIBUTES[self.random.integers(len(ATTRIBUTES))]
        if self.random.random() < 0.6:
            digits = self.random.integers(0, 10, self.random.integers(4, 8))
            return Fact(attribute, name, "".join(map(str, digits)))
        return Fact(attribute, name, self._some_words())

    def statement(self, fact: Fact) -> Tokens:
        """A sentence that states the fact."""
        return self._encode(fact.fill(STATEMENTS[self.random.integers(len(STATEMENTS))]))

    def question(self, fact: Fact) -> tuple[Tokens, int]:
        """(question and answer, number of tokens before the value)."""
        asked = self._encode(fact.fill(PROMPT))
        return np.concatenate([asked, self._encode(f" {fact.value}{ANSWER_END}")]), len(asked)

    def _state_new_fact(self, builder: _Builder, facts: list[Fact]) -> None:
        """Three in ten facts resemble an earlier one in name or attribute, so that both must be matched."""
        fact = self.fact()
        if facts and self.random.random() < 0.3:
            other = facts[self.random.integers(len(facts))]
            if self.random.random() < 0.5:
                fact = Fact(other.attribute, fact.name, fact.value)
            else:
                fact = Fact(fact.attribute, other.name, fact.value)
        if any(fact.about_the_same_as(other) for other in facts):
            return
        facts.append(fact)
        builder.add(self.statement(fact))

    def _recall(self, builder: _Builder) -> None:
        """Repeats an earlier run of tokens, which teaches copying."""
        sofar, _ = builder.joined()
        count = int(self.random.integers(24, 64))
        start = int(self.random.integers(0, len(sofar) - count))
        builder.add(self._encode(RECALL))
        builder.add(sofar[start : start + count], _RECALL_WEIGHT, _RECALL_FREE_TOKENS)

    def _some_words(self) -> str:
        chosen = self.random.integers(0, len(self._words), self.random.integers(1, 4))
        return " ".join(self._words[number] for number in chosen)

    def _encode(self, text: str) -> Tokens:
        if text not in self._encoded:
            tokens = np.asarray(self._tokenizer.encode(text).ids, np.int64)
            if len(self._encoded) >= _ENCODING_CACHE:
                return tokens
            self._encoded[text] = tokens
        return self._encoded[text]


class _Builder:
    """Tokens and weights so far."""

    def __init__(self) -> None:
        self._tokens: list[Tokens] = []
        self._weights: list[Weights] = []
        self.length = 0

    def add(self, tokens: Tokens, weight: float = 1.0, weightless: int = 0) -> None:
        """Appends tokens; those after the first `weightless` weigh `weight`, the others 1."""
        weights = np.ones(len(tokens), np.float32)
        weights[weightless:] = weight
        self._tokens.append(tokens)
        self._weights.append(weights)
        self.length += len(tokens)

    def joined(self) -> tuple[Tokens, Weights]:
        return np.concatenate(self._tokens), np.concatenate(self._weights)
