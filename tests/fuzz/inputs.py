"""Inputs by number, made of examples: bytes that are changed here and there, and documents with odd values in them.

The same number is the same input in every run. A library that draws inputs takes a millisecond for each, ten times what
most of what is tried out here takes; a failure names its number, which is small enough to look at.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

_NUMBERS = (
    *(0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
)
_BYTES = (0, 1, 9, 10, 13, 32, 34, 39, 44, 58, 91, 92, 93, 123, 125, 127, 128, 192, 224, 240, 255)
_WORDS = (
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"NaN",
    b"{}",
    b"[]",
    b'""',
    b"\\ud800",
    b"\xed\xa0\x80",
    b"..",
    b"/etc/passwd",
)

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, -0.0, 1e308, 10**25, 10**400, 2**31, 2**63 - 1, 2**63, 2**64),
    *(
        "",
        "x",
        "\ud800",
        "\x00",
        "a\x1b[2Jb",
        "../../etc/passwd",
        "{{ 7 * 7 }}",
        "x" * 3_000,
        "9999-12-31T23:59:59+00:00",
    ),
    *("1", "NaN", "none", "*", "é" * 200, "0" * 64, "f" * 64, " ", "\n"),
    *([], [None], [[[[[]]]]], [1, "a", None], {}, {"a": {"b": [1]}}, {"": ""}),
)


def changed(data: bytes, others: Sequence[bytes], draws: random.Random, head: int = 1 << 20) -> bytes:
    """The bytes with one to four changes. others: of which parts may come in. head: changes come before that byte."""
    found = bytearray(data)
    for _ in range(draws.choice((1, 1, 1, 2, 4))):
        size = min(len(found), head)
        at = draws.randrange(size + 1)
        match draws.randrange(9):
            case 0 | 1 if at < size:
                found[at] ^= 1 << draws.randrange(8)
            case 2 if at < size:
                found[at] = draws.choice(_BYTES)
            case 3:
                found[at:at] = draws.randbytes(draws.randrange(1, 9))
            case 4:
                del found[at : at + draws.choice((1, 2, 8, 64))]
            case 5:
                count = draws.choice((2, 4, 8))
                found[at : at + count] = draws.choice(_NUMBERS).to_bytes(8, "little")[:count]
            case 6:
                found[at : at + draws.randrange(5)] = draws.choice(_WORDS)
            case 7:
                other = draws.choice(others)
                start = draws.randrange(len(other) + 1)
                found[at : at + draws.randrange(20)] = other[start : start + draws.randrange(1, 40)]
            case _:
                del found[at:]
    return bytes(found)


def with_odd_values(document: str, draws: random.Random) -> Any:
    """A JSON document with one or two of its places changed."""
    found = json.loads(document)
    for _ in range(draws.choice((1, 1, 2))):
        everywhere = list(_places(found))
        if not everywhere:
            return deepcopy(draws.choice(ODD))
        holder, key = draws.choice(everywhere)
        match draws.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[draws.choice(("", "surprise", "\ud800", "id", "name", "x" * 500))] = deepcopy(
                    holder[key]
                )
            case 2:
                holder[key] = [holder[key]] * draws.choice((1, 2, 50))
            case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
                holder[key] = draws.choice((-1, 2, 1000, 10**9)) * holder[key]
            case 4 if isinstance(holder[key], str):
                holder[key] = changed(holder[key].encode("utf-8", "surrogatepass"), [b"a"], draws).decode(
                    "latin-1"
                )
            case _:
                holder[key] = deepcopy(draws.choice(ODD))  # later changes are to leave them as they are
    return found


def _places(found: Any) -> Iterator[tuple[Any, Any]]:
    items: Any = ()
    if isinstance(found, dict):
        items = list(found.items())
    elif isinstance(found, list):
        items = list(enumerate(found))
    for key, value in items:
        yield found, key
        yield from _places(value)


def as_json(found: Any) -> bytes:
    """Bytes as a careless writer makes them: NaN and infinities, too."""
    return json.dumps(found).encode()


def input_of(name: str, number: int, make: Callable[[random.Random], Any]) -> Any:
    """The input of that number."""
    return make(random.Random(f"{name} {number}"))
