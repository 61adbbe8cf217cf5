"""Documents with facts in them, and questions about the facts: made from any text, for any tokenizer.

A document is a real text of an exact number of tokens into which statements such as " The access code of the silver
falcon is 48213." are put at stratified random depths. Whoever can answer the questions has found the statements.
Names and values come from words that were never used for names when the embedded reader was trained.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

import numpy as np

from index_store.errors import InvalidArgumentError

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
PROMPT = "\nQuestion: What is the {attribute} of the {name}?\nAnswer: The {attribute} of the {name} is"
ANSWER_END = ".\n"


class Encoder(Protocol):
    """The part of a tokenizer that making a document needs."""

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Fact:
    """The `attribute` of the `name` is `value`."""

    attribute: str
    name: str
    value: str

    def statement(self, template: str) -> str:
        """The sentence that is put into the text."""
        return template.format(attribute=self.attribute, name=self.name, value=self.value)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one fact of a document.

    prompt: the question as a text to be completed, ending before the answer; a model without a chat template can
    be asked with it. token: where the fact's statement begins. depth: the same as a fraction of the document.
    """

    question: str
    answer: str
    prompt: str
    token: int
    depth: float


@dataclass(frozen=True, slots=True)
class Document:
    """A text of `token_count` tokens with facts in it.

    continuation: what follows in the source text, for measuring predictions of plain text.
    """

    text: str
    token_count: int
    questions: tuple[Question, ...]
    continuation: str


def parse_length(text: str) -> int:
    """Tokens: a number, or one with k for 1,024 ("32k"). Raises InvalidArgumentError."""
    found = re.fullmatch(r"(\d+)(k?)", text.strip().lower())
    if not found or int(found[1]) == 0:
        raise InvalidArgumentError(f"length is {text!r}, expected a number of tokens such as 8192 or 8k")
    return int(found[1]) * (1024 if found[2] else 1)


def held_out_text() -> str:
    """Three public-domain novels that the embedded reader was not trained on, about 395,000 of its tokens."""
    return lzma.decompress((files(__package__) / "data" / "held_out_novels.txt.xz").read_bytes()).decode()


def read_text(path: Path) -> str:
    """A UTF-8 text file, line ends as "\\n". Raises InvalidArgumentError for other bytes, OSError without the file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{path} is not UTF-8 text: byte {error.start} cannot be decoded"
        ) from error


def held_out_words() -> tuple[str, ...]:
    """1,000 common words that never named anything when the embedded reader was trained."""
    return tuple(json.loads((files(__package__) / "data" / "held_out_words.json").read_text()))


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    """Writes one JSON object per line."""
    path.write_text("".join(json.dumps(asdict(question)) + "\n" for question in questions))


def make_facts(
    rng: np.random.Generator, words: Sequence[str], count: int, distractors: int = 0
) -> list[Fact]:
    """`count` facts to ask about, then `distractors` that share an attribute or a name with one of them.

    No two facts state the same attribute of the same name.
    """
    facts: list[Fact] = []
    taken: set[tuple[str, str]] = set()
    while len(facts) < count + distractors:
        fact = _random_fact(rng, words)
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


def _random_fact(rng: np.random.Generator, words: Sequence[str]) -> Fact:
    def phrase() -> str:
        return " ".join(words[i] for i in rng.integers(0, len(words), int(rng.integers(1, 4))))

    name, attribute = phrase(), ATTRIBUTES[int(rng.integers(len(ATTRIBUTES)))]
    if rng.random() < 0.6:
        return Fact(attribute, name, "".join(str(d) for d in rng.integers(0, 10, int(rng.integers(4, 8)))))
    return Fact(attribute, name, phrase())


def make_document(
    encoder: Encoder,
    text: str,
    tokens: int,
    *,
    facts: int,
    seed: int,
    questions: int | None = None,
    distractors: int = 0,
    start: int = 0,
) -> Document:
    """A document of exactly `tokens` tokens: `text` from character `start` on, with facts put in.

    questions: how many of the facts are asked about, evenly over the depths; all of them by default.
    distractors: further facts that nearly equal one that is asked about.
    Raises InvalidArgumentError when the text is too short or the facts do not fit.
    """
    asked = facts if questions is None else questions
    if not 0 < asked <= facts or distractors < 0:
        raise InvalidArgumentError(
            f"{asked} questions about {facts} facts with {distractors} distractors: expected at least one question, "
            "at most one per fact, and no negative number"
        )
    rng = np.random.default_rng(seed)
    made = make_facts(rng, held_out_words(), facts, distractors)
    statements = [fact.statement(STATEMENTS[int(rng.integers(len(STATEMENTS)))]) for fact in made]
    order = rng.permutation(len(made))
    inserted = [statements[i] for i in order]
    room = tokens - len(encoder.encode("".join(inserted)))
    if room < 2 * tokens // 3:
        raise InvalidArgumentError(
            f"{len(made)} facts take {tokens - room} of {tokens} tokens, expected at most a third; "
            "ask for fewer facts or a longer document"
        )
    depths = (np.arange(len(made)) + rng.random(len(made))) / len(made)
    body = _Body(encoder, text, start, inserted, depths, room)
    end = body.fit(tokens)
    places = body.statement_tokens()
    asked_facts = [j for j in range(len(made)) if order[j] < facts]
    chosen = [asked_facts[i] for i in np.linspace(0, len(asked_facts) - 1, asked).round().astype(int)]
    return Document(
        text=body.assemble(end),
        token_count=tokens,
        questions=tuple(_question(made[order[j]], places[j], tokens) for j in chosen),
        continuation=text[end:],
    )


def _question(fact: Fact, token: int, tokens: int) -> Question:
    words = {"attribute": fact.attribute, "name": fact.name}
    return Question(QUESTION.format(**words), fact.value, PROMPT.format(**words), token, token / tokens)


class _Body:
    """A stretch of text with statements at fixed places, whose end is moved until the token count fits."""

    def __init__(
        self,
        encoder: Encoder,
        text: str,
        start: int,
        statements: Sequence[str],
        depths: np.ndarray,
        room: int,
    ) -> None:
        self._encoder, self._text, self._start, self._statements = encoder, text, start, statements
        self._guess = self._characters_of(room)
        length = self._guess - start
        # Away from the end, which still moves by a few words.
        last = self._guess - min(64, length // 8)
        reach = length // (4 * len(statements))
        self._cuts = sorted(
            min(_sentence_end(text, start + int(depth * length), reach), _word_end(text, last))
            for depth in depths
        )

    def _characters_of(self, tokens: int) -> int:
        """About where the source must end to give that many tokens without any statement."""
        ratio = characters_per_token(self._encoder, self._text[self._start :])
        end = self._start + round(tokens * ratio)
        for _ in range(3):
            if end > len(self._text):
                raise _too_short(len(self._text) - self._start, end - self._start)
            found = len(self._encoder.encode(self._text[self._start : end]))
            end += round((tokens - found) * ratio)
        return end

    def assemble(self, end: int) -> str:
        """The document when the source text is used up to character `end`."""
        parts, previous = [], self._start
        for cut, statement in zip(self._cuts, self._statements, strict=True):
            parts += [self._text[previous:cut], statement]
            previous = cut
        return "".join([*parts, self._text[previous:end]])

    def fit(self, tokens: int) -> int:
        """The character at which the source must end for the document to have exactly that many tokens."""
        end, ratio = self._guess, (self._guess - self._start) / tokens
        for _ in range(12):
            difference = tokens - self._count(end)
            if difference == 0 and self._at_word_end(end):
                return end
            if abs(difference) <= 2:
                break
            end += round(difference * ratio)
        near = [end + step for distance in range(600) for step in (distance, -distance)]
        lowest = self._cuts[-1] + 1
        near = [candidate for candidate in near if lowest < candidate <= len(self._text)]
        words = [candidate for candidate in near if self._at_word_end(candidate)]
        for candidate in words[:120] + near[:240]:
            if self._count(candidate) == tokens:
                return candidate
        raise InvalidArgumentError(
            f"no cut of the text gives exactly {tokens} tokens; try another length, seed or text",
            tokens=tokens,
        )

    def statement_tokens(self) -> list[int]:
        """How many tokens stand before each statement (statements follow whole words, so pieces add up)."""
        places, count, previous = [], 0, self._start
        for cut, statement in zip(self._cuts, self._statements, strict=True):
            count += len(self._encoder.encode(self._text[previous:cut]))
            places.append(count)
            count += len(self._encoder.encode(statement))
            previous = cut
        return places

    def _count(self, end: int) -> int:
        if end > len(self._text):
            raise _too_short(len(self._text) - self._start, end - self._start)
        return len(self._encoder.encode(self.assemble(end)))

    def _at_word_end(self, end: int) -> bool:
        return end == len(self._text) or (self._text[end].isspace() and not self._text[end - 1].isspace())


def characters_per_token(encoder: Encoder, text: str) -> float:
    """Measured on the first 40,000 characters."""
    sample = text[:40_000]
    return len(sample) / max(1, len(encoder.encode(sample)))


def _sentence_end(text: str, near: int, reach: int) -> int:
    """The first character after a sentence that ends within `reach` characters after `near`, or after a word."""
    found = text.find(". ", near, near + reach)
    return found + 1 if found >= 0 else _word_end(text, near)


def _word_end(text: str, near: int) -> int:
    while near < len(text) and not text[near].isspace():
        near += 1
    return near


def _too_short(found: int, expected: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the text has {found} characters where about {expected} are needed; give a longer text or ask for fewer tokens"
    )


def make_documents(
    encoder: Encoder,
    text: str,
    tokens: int,
    *,
    count: int,
    facts: int,
    seed: int,
    distractors: int = 0,
    spare: int = 0,
) -> list[Document]:
    """`count` documents over different parts of the text; parts overlap only when the text is too short for that.

    spare: characters that must remain after each document, for its continuation.
    Raises InvalidArgumentError when the text is too short for a single document.
    """
    needed = round(tokens * characters_per_token(encoder, text) * 1.05) + 1_000 + spare
    if needed > len(text):
        raise _too_short(len(text), needed)
    stride = len(text) // count
    if stride >= needed:
        offsets = np.random.default_rng(seed).integers(0, stride - needed + 1, count)
        starts = [i * stride + int(offset) for i, offset in enumerate(offsets)]
    else:
        starts = [int(start) for start in np.linspace(0, len(text) - needed, count)]
    return [
        make_document(
            encoder,
            text,
            tokens,
            facts=facts,
            seed=seed + i,
            distractors=distractors,
            start=_word_end(text, start) if start else 0,
        )
        for i, start in enumerate(starts)
    ]
