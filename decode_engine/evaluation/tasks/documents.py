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
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from decode_engine.evaluation.tasks.family import ANSWER_END, PROMPT_FORM, Asked, get_family
from index_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np


_PACKAGE = "decode_engine.evaluation"


def parse_length(text: str) -> int:
    """Tokens: a number, or one with k for 1,024 ("32k"). Raises InvalidArgumentError."""
    found = re.fullmatch(r"(\d+)(k?)", text.strip().lower())
    if not found or int(found[1]) == 0:
        raise InvalidArgumentError(f"length is {text!r}, expected a number of tokens such as 8192 or 8k")
    return int(found[1]) * (1024 if found[2] else 1)


def held_out_text() -> str:
    """Three public-domain novels that the embedded reader was not trained on, about 395,000 of its tokens."""
    return lzma.decompress((files(_PACKAGE) / "data" / "held_out_novels.txt.xz").read_bytes()).decode()


def held_out_words() -> tuple[str, ...]:
    """1,000 common words that never named anything when the embedded reader was trained."""
    return tuple(json.loads((files(_PACKAGE) / "data" / "held_out_words.json").read_text()))


def read_text(path: Path) -> str:
    """A UTF-8 text file, line ends as "\\n". Raises InvalidArgumentError for other bytes, OSError without the file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{path} is not UTF-8 text: byte {error.start} cannot be decoded"
        ) from error


def source_text(paths: Sequence[Path]) -> str:
    """The files' texts, an empty line between them; the packaged novels without any file.

    Raises InvalidArgumentError for an empty file, else as `read_text`.
    """
    texts = [read_text(path) for path in paths]
    for path, text in zip(paths, texts, strict=True):
        if not text.strip():
            raise InvalidArgumentError(f"text {path} is empty; expected words to make a document of")
    return "\n\n".join(texts) if texts else held_out_text()


class Encoder(Protocol):
    """The part of a tokenizer that making a document needs."""

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens."""
        ...


class Body:
    """A stretch of text with statements at fixed places, whose end is moved until the token count fits.

    start: its first character in `text`. depths: where the statements go, ascending fractions of it. room: about how
    many tokens it may take without the statements.
    """

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
            min(_sentence_end(text, start + int(depth * length), reach), word_end(text, last))
            for depth in depths
        )

    def _characters_of(self, tokens: int) -> int:
        """About where the source must end to give that many tokens without any statement."""
        ratio = characters_per_token(self._encoder, self._text[self._start :])
        end = self._start + round(tokens * ratio)
        for _ in range(3):
            if end > len(self._text):
                raise too_short(len(self._text) - self._start, end - self._start)
            found = len(self._encoder.encode(self._text[self._start : end]))
            end += round((tokens - found) * ratio)
        return end

    def assemble(self, end: int) -> str:
        """The document when the source text is used up to character `end`."""
        return "".join(self._parts(end))

    def _parts(self, end: int) -> list[str]:
        """Source and statements in turn; the source comes first and last."""
        parts, previous = [], self._start
        for cut, statement in zip(self._cuts, self._statements, strict=True):
            parts += [self._text[previous:cut], statement]
            previous = cut
        return [*parts, self._text[previous:end]]

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

    def statement_tokens(self, end: int) -> list[int]:
        """How many tokens stand before each statement of the document that ends at character `end`.

        Statements follow whole words, so for most tokenizers the pieces' counts add up. Where they do not (some
        put a mark before every text), everything before each statement is encoded instead.
        """
        parts = self._parts(end)
        counts = [len(self._encoder.encode(part)) for part in parts]
        if sum(counts) == self._count(end):
            return list(accumulate(counts))[0 : len(parts) - 1 : 2]
        return [len(self._encoder.encode("".join(parts[: i + 1]))) for i in range(0, len(parts) - 1, 2)]

    def _count(self, end: int) -> int:
        if end > len(self._text):
            raise too_short(len(self._text) - self._start, end - self._start)
        return len(self._encoder.encode(self.assemble(end)))

    def _at_word_end(self, end: int) -> bool:
        return end == len(self._text) or (self._text[end].isspace() and not self._text[end - 1].isspace())


def characters_per_token(encoder: Encoder, text: str) -> float:
    """Measured on the first 40,000 characters."""
    sample = text[:40_000]
    return len(sample) / max(1, len(encoder.encode(sample)))


def word_end(text: str, near: int) -> int:
    """The first place from `near` on where a word has ended."""
    while near < len(text) and not text[near].isspace():
        near += 1
    return near


def _sentence_end(text: str, near: int, reach: int) -> int:
    """The first character after a sentence that ends within `reach` characters after `near`, or after a word."""
    found = text.find(". ", near, near + reach)
    return found + 1 if found >= 0 else word_end(text, near)


def too_short(found: int, expected: int) -> InvalidArgumentError:
    """The error for a text that does not suffice."""
    return InvalidArgumentError(
        f"the text has {found} characters where about {expected} are needed; give a longer text or ask for fewer tokens"
    )


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a document.

    prompt: the question as a text to be completed, ending before the answer; a model without a chat template can
    be asked with it. token: where the first statement begins that has to be read for the answer. depth: the same as
    a fraction of the document. opening: the end of the prompt, with which the answer's sentence begins. family: name
    of the task. evidence: where every statement begins that has to be read, in the order of the answer. ending: what
    follows the answer in the text that a model is judged by.
    """

    question: str
    answer: str
    prompt: str
    token: int
    depth: float
    opening: str = ""
    family: str = "single"
    evidence: tuple[int, ...] = ()
    ending: str = ANSWER_END


@dataclass(frozen=True, slots=True)
class Document:
    """A text of `token_count` tokens with facts in it.

    continuation: what follows in the source text, for measuring predictions of plain text. stretch: of several, which
    stretch of the source text this is of: documents of different stretches have no text in common.
    """

    text: str
    token_count: int
    questions: tuple[Question, ...]
    continuation: str
    family: str = "single"
    stretch: int = 0


@dataclass(frozen=True, slots=True)
class DocumentSet:
    """`count` documents of one family, with `facts` questions in each.

    distractors: statements per document that resemble others; the family's own number when None.
    """

    count: int
    facts: int
    family: str = "single"
    distractors: int | None = None


def make_document(
    encoder: Encoder,
    text: str,
    tokens: int,
    *,
    facts: int,
    seed: int,
    questions: int | None = None,
    distractors: int | None = None,
    start: int = 0,
    family: str = "single",
) -> Document:
    """A document of exactly `tokens` tokens: `text` from character `start` on, with facts put in.

    facts: how many questions it could be asked. questions: how many of them are returned, evenly over the depths; all
    by default. distractors: further statements that nearly equal one that is asked about; the family's own number
    by default. Raises InvalidArgumentError when the text is too short or the statements do not fit.
    """
    import numpy as np  # not above: the command line reads the families

    task = get_family(family)
    asked = facts if questions is None else questions
    extra = task.distractors * facts if distractors is None else distractors
    if not 0 < asked <= facts or extra < 0:
        raise InvalidArgumentError(
            f"{asked} questions about {facts} facts with {extra} distractors: expected at least one question, "
            "at most one per fact, and no negative number"
        )
    rng = np.random.default_rng(seed)
    draft = task.draft(rng, held_out_words(), facts, extra)
    count = len(draft.statements)
    room = tokens - len(encoder.encode("".join(draft.statements)))
    if room < 2 * tokens // 3:
        raise InvalidArgumentError(
            f"{facts} facts of task {family!r} take {tokens - room} of {tokens} tokens, expected at most a third; "
            "ask for fewer facts or a longer document"
        )
    depths = (np.arange(count) + rng.random(count)) / count
    body = Body(encoder, text, start, draft.statements, depths, room)
    end = body.fit(tokens)
    places = body.statement_tokens(end)
    by_depth = sorted(draft.asked, key=lambda one: min(one.evidence))
    chosen = [by_depth[i] for i in np.linspace(0, len(by_depth) - 1, asked).round().astype(int)]
    return Document(
        text=body.assemble(end),
        token_count=tokens,
        questions=tuple(_question(one, places, tokens, family) for one in chosen),
        continuation=text[end:],
        family=family,
    )


def _question(asked: Asked, places: Sequence[int], tokens: int, family: str) -> Question:
    evidence = tuple(places[i] for i in asked.evidence)
    return Question(
        question=asked.question,
        answer=asked.answer,
        prompt=PROMPT_FORM.format(question=asked.question, opening=asked.opening),
        token=min(evidence),
        depth=min(evidence) / tokens,
        opening=asked.opening,
        family=family,
        evidence=evidence,
    )


def make_documents(
    encoder: Encoder, text: str, tokens: int, sets: Sequence[DocumentSet], *, seed: int, spare: int = 0
) -> list[Document]:
    """Documents over different parts of the text, which overlap only when the text is too short for that.

    spare: characters that must remain after each document, for its continuation. Documents that overlap, or overlap
    with the same ones, are of one stretch.
    Raises InvalidArgumentError when the text is too short for a single document.
    """
    import numpy as np

    needed = round(tokens * characters_per_token(encoder, text) * 1.05) + 1_000 + spare
    if needed > len(text):
        raise too_short(len(text), needed)
    each = [one for one in sets for _ in range(one.count)]
    stride = len(text) // len(each)
    if stride >= needed:
        offsets = np.random.default_rng(seed).integers(0, stride - needed + 1, len(each))
        starts = [i * stride + int(offset) for i, offset in enumerate(offsets)]
    else:
        starts = [int(start) for start in np.linspace(0, len(text) - needed, len(each))]
    documents: list[Document] = []
    stretch, used = -1, 0
    for i, (one, near) in enumerate(zip(each, starts, strict=True)):
        start = word_end(text, near) if near else 0
        document = make_document(
            encoder,
            text,
            tokens,
            facts=one.facts,
            seed=seed + i,
            distractors=one.distractors,
            start=start,
            family=one.family,
        )
        stretch += start >= used
        documents.append(replace(document, stretch=stretch))
        used = len(text) - len(document.continuation) + spare
    return documents


def chat_question(question: Question, asked: str) -> Question:
    """The question with the opening as the beginning of the model's turn, which is all that its prompt holds then.

    asked: the question in the model's chat template. The answer ends with its full stop: how a chat model goes on after
    that is its template's business.
    """
    space = "" if asked[-1:].isspace() or asked.endswith(">") else " "
    return replace(question, prompt=f"{space}{question.opening}", ending=".")


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    path.write_text("".join(json.dumps(asdict(question)) + "\n" for question in questions))
