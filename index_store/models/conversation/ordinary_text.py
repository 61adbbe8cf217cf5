"""Texts to token ids with special tokens recognised only where a chat template wrote them.

Special is what a tokenizer's files flag as special, what ends an answer, and what of its added tokens the chat template
writes, such as the marks around a tool's answer. A rendering is cut at the special
tokens of the template; what stands between two of them is one ordinary text, whoever wrote its parts, and gets the
tokens that the tokenizer gives for it. So words of a user merge with the words that a template puts beside them, as
they do everywhere else, and never with special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Pipeline

from index_store.errors import InvalidArgumentError
from index_store.models.conversation.chat_template import Rendering

_BEFORE = ("\n", ".", "a", "0")
"""Texts that are put before another one to see its tokens there; one of them does not merge with it."""

_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """One special token. lstrip, rstrip: whether it takes the white space before and behind it with it."""

    id: int
    text: str
    lstrip: bool
    rstrip: bool


class OrdinaryText:
    """What a tokenizer of transformers makes of texts in which nothing is special."""

    def __init__(self, backend: Any, end_ids: Sequence[int]) -> None:
        """end_ids: of tokens that end an answer."""
        self._backend = backend
        known = backend.added_tokens_decoder
        template = str(backend.chat_template or "")
        self.special = tuple(
            SpecialToken(id_, token.content, token.lstrip, token.rstrip)
            for id_, token in known.items()
            if token.special or id_ in end_ids or (not token.content.isspace() and token.content in template)
        )
        # What stands for text that a vocabulary lacks is special, and ordinary text may well become it.
        self._never = frozenset(token.id for token in self.special) - {backend.unk_token_id}

    @property
    def spoken(self) -> tuple[str, ...]:
        """Special tokens that are not flagged so: a model writes them into its answers, where they are read as text."""
        known = self._backend.added_tokens_decoder
        return tuple(token.text for token in self.special if not known[token.id].special)

    @property
    def letterless(self) -> str:
        """Characters of special tokens that have neither letters nor digits."""
        return "".join(
            sorted(
                {
                    letter
                    for token in self.special
                    for letter in token.text
                    if not re.search(r"[^\W_]", token.text)
                }
            )
        )

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Token ids of a text. first: False for a text that stands behind others.

        Raises InvalidArgumentError for a text that this tokenizer can only write by a special token.
        """
        return self._encode(text, self._first if first else self._later)

    def encode_behind(self, text: str) -> list[int]:
        """Token ids of a text that goes on where another one ends: without what a tokenizer puts before a first text.

        Raises InvalidArgumentError as `encode` does.
        """
        if text and self._puts_something_before:
            for before in _BEFORE:
                ids = self._behind(before, text)
                if ids is not None:
                    return ids
        return self.encode(text)

    def encode_rendering(
        self, rendering: Rendering, *, first: bool = True, behind_text: bool = False
    ) -> list[int]:
        """Token ids of what a chat template wrote, its special tokens among them.

        first: False for what stands behind others; behind_text: and goes on where a text ends.
        """
        ids: list[int] = []
        position = 0
        for start, end, token in [*self._found(rendering), (len(rendering.text), 0, None)]:
            if start > position:
                text = rendering.text[position:start]
                begins = behind_text and not ids
                ids += self.encode_behind(text) if begins else self.encode(text, first=first and not ids)
            if token is not None:
                ids.append(token.id)
            position = end
        return ids

    def shown(self, ids: Sequence[int]) -> str:
        """The first token and its text, as errors quote it."""
        if not ids:
            return "nothing"
        text = self._backend.decode(list(ids[:1]), clean_up_tokenization_spaces=False)
        return f"{ids[0]} ({text!r})"

    def _found(self, rendering: Rendering) -> Iterable[tuple[int, int, SpecialToken]]:
        """The template's special tokens: where each begins and ends, with the white space that it takes."""
        if self._pattern is None:
            return
        marks, position = rendering.marks, 0
        for match in self._pattern.finditer(marks):
            token = self._by_text[match[0]]
            start, end = match.span()
            if token.lstrip:
                start = position + len(marks[position:start].rstrip())
            if token.rstrip:
                end = _BLANKS.match(marks, end).end()  # type: ignore[union-attr]  # which nothing fits, too
            if start >= position:
                yield start, end, token
                position = end

    @cached_property
    def _puts_something_before(self) -> bool:
        """Whether a text has other tokens where nothing stands before it; found out by trying."""
        tried = ((text, self._behind(before, text)) for text in ("a", "1") for before in _BEFORE)
        return any(ids is not None and ids != self.encode(text) for text, ids in tried)

    def _behind(self, before: str, text: str) -> list[int] | None:
        """Token ids of a text behind another one; None where the two merge."""
        head, ids = self.encode(before), self.encode(before + text)
        return ids[len(head) :] if ids[: len(head)] == head else None

    @cached_property
    def _by_text(self) -> dict[str, SpecialToken]:
        return {token.text: token for token in self.special}

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """Finds special tokens, of several in one place the longest."""
        if not self.special:
            return None
        texts = sorted(self._by_text, key=len, reverse=True)
        initials = "".join(re.escape(letter) for letter in sorted({text[0] for text in texts}))
        return re.compile(f"(?=[{initials}])(?:{'|'.join(map(re.escape, texts))})")

    @cached_property
    def _first(self) -> Pipeline | None:
        """The tokenizer's own pipeline, blind for special tokens; None for one that is written in Python."""
        own = getattr(self._backend, "backend_tokenizer", None)
        return None if own is None else self._blind(own.to_str())

    @cached_property
    def _later(self) -> Pipeline | None:
        """The same for texts behind others: some tokenizers put a blank before the first text alone."""
        own = getattr(self._backend, "backend_tokenizer", None)
        if own is None:
            return None
        document = own.to_str()
        later = re.sub(r'("prepend_scheme"\s*:\s*)"first"', r'\1"never"', document)
        return self._first if later == document else self._blind(later)

    def _blind(self, document: str) -> Pipeline:
        if self.spoken:
            fields = json.loads(document)
            special = {token.id for token in self.special}
            for token in fields["added_tokens"]:
                token["special"] = token["special"] or token["id"] in special
            document = json.dumps(fields)
        pipeline = Pipeline.from_str(document)
        pipeline.no_truncation()
        pipeline.no_padding()
        pipeline.encode_special_tokens = True
        return pipeline

    def _encode(self, text: str, pipeline: Pipeline | None) -> list[int]:
        if not text:
            return []
        if pipeline is None:
            found = self._backend(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
            ids, offsets = list(found["input_ids"]), []
        else:
            encoding = pipeline.encode(text, add_special_tokens=False)
            ids = encoding.ids
            offsets = [] if self._never.isdisjoint(ids) else encoding.offsets
        if self._never.isdisjoint(ids):
            return ids
        # A vocabulary may hold a special token as a word, too: where that word is cut, it is none.
        place = next(place for place, id_ in enumerate(ids) if id_ in self._never)
        start, end = offsets[place] if offsets else (0, 0)
        if end - start < 2:
            raise InvalidArgumentError(
                f"the text contains {self._backend.convert_ids_to_tokens(ids[place])!r}, which this model's tokenizer "
                "can only write as a special token; leave it out"
            )
        return self._encode(text[: start + 1], pipeline) + self.encode_behind(text[start + 1 :])
