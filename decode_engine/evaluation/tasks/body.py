"""A stretch of text with statements in it that has exactly the wanted number of tokens, for any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from index_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np


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
