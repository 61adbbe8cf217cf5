"""Token ids to text, one token at a time: no half characters, and stop strings across token borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

_REPLACEMENT = "�"
_CONTEXT_TOKENS = 8
_MAX_PENDING = 256
_MAX_HELD = 3  # bytes of an incomplete character, and so tokens or replacements that may become one


class Detokenizer:
    """Decodes a growing token sequence; what it has returned never changes afterwards.

    Tokens are decoded together with a few before them, because tokenizers treat the first token of a text
    differently (a leading space may be dropped) and a character may span several tokens. Replacements at the end of
    the text may still become a character and are held back, at most _MAX_HELD of them: a byte-level decoder writes
    one for an incomplete character, a byte-fallback decoder one for each of its bytes.

    A byte-fallback decoder moreover replaces every byte of a run of byte tokens when any part of the run is not
    UTF-8. So tokens are pending until their text ends with a whole character, they are decoded without those before
    them where these would be replaced too, and of a run that cannot become text any more the first byte is given up
    and the rest is tried again.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        """`decode` maps token ids to text; `prompt_ids` are the tokens before the first pushed one."""
        self._decode = decode
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._known = 0  # characters of the pending tokens' text that were returned already
        for token_id in prompt_ids[-_CONTEXT_TOKENS - _MAX_HELD :]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that became certain, possibly none."""
        self._pending.append(token_id)
        text = self._pending_text()
        if self._first_is_invalid(text):
            return self._give_up_first(text)
        replaced = _replacements(text)
        certain = len(text) - min(replaced, _MAX_HELD)
        fresh = text[self._known : certain]
        self._known = max(self._known, certain)
        if not replaced:
            self._settle()
        elif len(self._pending) > _MAX_PENDING:
            self._cut()
        return fresh

    def _pending_text(self) -> str:
        text = self._decode([*self._context, *self._pending])
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(self._pending)

    def _first_is_invalid(self, text: str) -> bool:
        """Whether the pending tokens are bytes of no character: too many for one, or followed by clean text."""
        clean = text.lstrip(_REPLACEMENT)
        invalid = len(text) - len(clean)
        if clean and not clean.endswith(_REPLACEMENT):
            return invalid == len(self._pending) - 1 > 0
        return invalid == len(self._pending) > _MAX_HELD

    def _give_up_first(self, text: str) -> str:
        """Returns the replacement of the first pending token and takes up the others anew."""
        fresh = text[self._known : 1]
        self._known = max(self._known - 1, 0)
        _, *rest = self._pending
        self._pending = []
        return fresh + "".join([self.push(token_id) for token_id in rest])

    def _settle(self) -> None:
        """Makes the pending tokens, whose text is whole, the beginning of the next decoding.

        The tokens before them stay as well while the pending ones alone decode to nothing, as special tokens do.
        """
        alone = self._decode(self._pending)
        tokens = self._pending if alone else [*self._context, *self._pending]
        if alone or len(tokens) > _MAX_PENDING:
            tokens = tokens[-_CONTEXT_TOKENS:]
        self._context, self._context_text = tokens, self._decode(tokens)
        self._pending, self._known = [], 0

    def _cut(self) -> None:
        """Cuts pending tokens anywhere, so that a token's cost stays bounded also where no character ends with it."""
        before, self._pending = self._pending[:-_MAX_HELD], self._pending[-_MAX_HELD:]
        self._context = before[-_CONTEXT_TOKENS:]
        self._context_text = self._decode(self._context).rstrip(_REPLACEMENT)
        text = self._pending_text()
        self._known = len(text) - min(_replacements(text), _MAX_HELD)


def _replacements(text: str) -> int:
    return len(text) - len(text.rstrip(_REPLACEMENT))


class StopStrings:
    """Finds the first of several stop strings in a text that arrives in pieces.

    Text is held back exactly while it could be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Adds text; returns the text that can be shown and whether a stop string was completed."""
        self._held += text
        found = [position for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """What was held back, when nothing more will come."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TokenText(NamedTuple):
    """Text that a token made certain, and whether it completed a stop string (which the text leaves out)."""

    text: str
    stopped: bool


class TextStream:
    """A session's tokens as its client reads them: detokenised, ended by stop strings."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """min_tokens: before so many no stop string is looked for."""
        self._free_tokens = min_tokens - 1
        self._detokenizer = Detokenizer(decode, prompt_ids)
        self._stops = StopStrings(stops)

    def push(self, token_id: int) -> TokenText:
        text = self._detokenizer.push(token_id)
        if self._free_tokens > 0:
            self._free_tokens -= 1
            return TokenText(text, False)
        return TokenText(*self._stops.push(text))

    def flush(self) -> str:
        """Held-back text at the end of a generation. An incomplete character is dropped."""
        return self._stops.flush()
