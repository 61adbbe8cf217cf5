"""JSON schemas as programs have them, made up at random; and a vocabulary with a grammar over it."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from decode_engine.engine.sampling.constraints import make_matcher
from decode_engine.engine.sampling.grammar import Grammar
from decode_engine.orders.order import Constraint

_WORDS = (
    "harbour",
    "lamp",
    "keeper",
    "ships",
    "code",
    "Größe",
    "stock",
    "date",
    "note",
    "isOpen",
    "a b",
    "名",
)


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema that something satisfies, nested at most so deep."""
    plain = [_integer, _number, _text, _choice, _boolean]
    nested: list[Callable[[random.Random, int], dict[str, Any]]] = [_object, _array, _either]
    if depth and draw.random() < 0.7:
        return draw.choice(nested)(draw, depth - 1)
    return draw.choice(plain)(draw)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_WORDS, draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(draw, depth) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(draw, depth),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }


def _either(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(draw, depth) for _ in range(2)]}


def _integer(draw: random.Random) -> dict[str, Any]:
    least = draw.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 10 ** draw.randint(0, 6))}


def _number(draw: random.Random) -> dict[str, Any]:
    return {"type": "number", "minimum": -draw.randint(0, 50), "exclusiveMaximum": draw.randint(1, 50)}


def _text(draw: random.Random) -> dict[str, Any]:
    return draw.choice(
        [
            {"type": "string", "maxLength": draw.randint(1, 20)},
            {"type": "string", "minLength": 2, "maxLength": 12},
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
            {"type": "string", "format": "date", "maxLength": 10},
        ]
    )


def _choice(draw: random.Random) -> dict[str, Any]:
    return {"enum": draw.sample([*_WORDS, 1, 2.5, None, True], draw.randint(1, 5))}


def _boolean(draw: random.Random) -> dict[str, Any]:
    return {"type": draw.choice(["boolean", "null"])}


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
