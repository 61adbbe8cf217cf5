"""A vocabulary of made-up words, as many as large models have, and grammars over it."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLTokenizer, TokenizerWrapper

from decode_engine.engine.sampling.constraints import make_matcher
from decode_engine.engine.sampling.grammar import Grammar
from decode_engine.orders.order import Constraint

END = 0
_LONGEST = 9


class Words:
    """What llguidance wants of a tokenizer: an end, all single bytes, then different words, some behind a space."""

    eos_token_id = END
    bos_token_id = None

    def __init__(self, count: int) -> None:
        draw = random.Random(0)
        letters = string.ascii_letters + string.digits + string.punctuation
        singles = [bytes([byte]) for byte in range(256)]
        words: dict[bytes, None] = dict.fromkeys([b"<end>", *singles])
        while len(words) < count:
            length = draw.randint(2, _LONGEST)
            words[(draw.choice(["", " "]) + "".join(draw.choices(letters, k=length))).encode()] = None
        self.tokens: Sequence[bytes] = list(words)
        self.special_token_ids = [END]

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text: its bytes."""
        return [1 + byte for byte in text]


def make_grammar(constraint: Constraint, vocabulary: int, threads: int) -> Grammar:
    """A constraint over so many words. Raises UnfitConstraintError."""
    tokenizer = LLTokenizer(TokenizerWrapper(Words(vocabulary)), n_vocab=vocabulary)
    return Grammar(make_matcher(tokenizer, constraint), ThreadPoolExecutor(threads, "grammar"))
