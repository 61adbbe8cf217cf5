"""Token ids to text, one token at a time: no half characters, and stop strings across token borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from index_store.errors import InvalidArgumentError

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256

_REPLACEMENT = "�"
_PROMPT_TOKENS = 8
_MAX_WINDOW = 256


class Detokenizer:
    """Decodes a growing token sequence; what it has returned never changes afterwards.

    Tokens are decoded together with a few before them, because tokenizers treat the first token of a text
    differently (a leading space may be dropped) and a character may span several tokens. While the text ends in
    U+FFFD, its last character may still be incomplete and is held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        """`decode` maps token ids to text; `prompt_ids` are the tokens before the first pushed one."""
        self._decode = decode
        self._window = list(prompt_ids[-_PROMPT_TOKENS:])
        self._known = len(self._settled(self._decode(self._window)))
        self._clean = len(self._window)

    @staticmethod
    def _settled(text: str) -> str:
        return text[:-1] if text.endswith(_REPLACEMENT) else text

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that became certain, possibly none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = not text.endswith(_REPLACEMENT)
        settled = text if whole else text[:-1]
        fresh = settled[self._known :]
        self._known = max(self._known, len(settled))
        if whole or len(self._window) > _MAX_WINDOW:
            self._shorten(whole)
        return fresh

    def _shorten(self, whole: bool) -> None:
        """Keeps the tokens since the previous character border as the beginning of the next decoding.

        They stay longer while they decode to nothing, as special tokens do. Beyond _MAX_WINDOW tokens without a
        border the sequence is not text; it is cut anywhere, so that the cost of a token stays bounded.
        """
        recent = self._window[self._clean :]
        if self._decode(recent) or len(self._window) > _MAX_WINDOW:
            self._window = recent[-_PROMPT_TOKENS:]
            text = self._decode(self._window)
            self._known = len(text if whole else self._settled(text))
        self._clean = len(self._window)


class StopStrings:
    """Finds the first of several stop strings in a text that arrives in pieces.

    Text is held back exactly while it could be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidArgumentError(
                f"{len(stops)} stop strings were given, expected at most {MAX_STOP_STRINGS}", field="stop"
            )
        for stop in stops:
            if not 1 <= len(stop) <= MAX_STOP_LENGTH:
                raise InvalidArgumentError(
                    f"a stop string has {len(stop)} characters, expected 1 to {MAX_STOP_LENGTH}", field="stop"
                )
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


@dataclass(frozen=True, slots=True)
class Piece:
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
    ) -> None:
        self._detokenizer = Detokenizer(decode, prompt_ids)
        self._stops = StopStrings(stops)

    def push(self, token_id: int) -> Piece:
        """Adds a token."""
        return Piece(*self._stops.push(self._detokenizer.push(token_id)))

    def flush(self) -> str:
        """Held-back text at the end of a generation. An incomplete character is dropped."""
        return self._stops.flush()
