"""Recordings of what the doors were asked and replied: files of JSON lines, and what is the same in two replies.

A case is one line of a request, `{"case": ..., ...}`, and the lines of its reply behind it. In a request `"<NAME>"`
stands for an id that has that name, and `{"repeat": VALUE, "times": N}` for a long text or list. In a reply ids are
written by their names, those without one as `<id 1>`, `<id 2>` in the order of the case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Any

_NAME = re.compile(r"<([a-z][a-z ]*)>")
_ID = re.compile(r"(?<![0-9a-f])(?:[0-9a-f]{64}|[0-9a-f]{32})(?![0-9a-f])")
_DIGITS = re.compile(r"(?<![0-9a-z])[0-9a-f]{6,31}(?![0-9a-z])")
_TIME = re.compile(r"20[2-8]\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00| UTC)")
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
_TOLERANCE = 5e-3
"""Between floats of two machines, relative above 1."""

Line = dict[str, Any]


@dataclass
class Case:
    """A request, and the lines of the reply to it."""

    request: Line
    reply: list[Line] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What it is about."""
        return str(self.request["case"])


def read_cases(file: Path) -> list[Case]:
    """The cases of a file, in order. Raises ValueError where two have the same name."""
    cases: list[Case] = []
    for text in file.read_text().splitlines():
        line = json.loads(text)
        if "case" in line:
            cases.append(Case(line))
        else:
            cases[-1].reply.append(line)
    names = [case.name for case in cases]
    if len(set(names)) < len(names):
        raise ValueError(
            f"{file.name} has a name twice: {sorted(one for one in names if names.count(one) > 1)}"
        )
    return cases


def write_cases(file: Path, cases: list[Case]) -> None:
    """Writes the cases, a line for each request and each part of a reply."""
    lines = [line for case in cases for line in (case.request, *case.reply)]
    file.write_text("".join(f"{_text(line)}\n" for line in lines))


def differences(case: Case, played: list[Line]) -> str:
    """What is not as it was recorded, as lines with - and +; "" where all is. Floats may differ a little."""
    told = [
        old if old is not None and _alike(old, new) else new
        for old, new in zip([*case.reply, *[None] * len(played)], played, strict=False)
    ]
    lines = unified_diff([*map(_text, case.reply)], [*map(_text, told)], "recorded", "now", lineterm="", n=1)
    return "\n".join(lines)


def _text(line: Line) -> str:
    return json.dumps(line, ensure_ascii=False)


def _alike(one: Any, other: Any) -> bool:
    """Whether values are the same, in the same order, floats within the tolerance."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= _TOLERANCE * max(1.0, abs(one))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


class Names:
    """Names of ids: those that were given, and those that requests give to what appears first in their replies."""

    def __init__(self, given: Mapping[str, str]) -> None:
        """given: ids by name."""
        self._ids = dict(given)

    def resolve(self, value: Any) -> Any:
        """What a recorded request says, with ids for names. Raises KeyError for a name that nobody gave."""
        if isinstance(value, str):
            return _NAME.sub(lambda found: self._ids[found[1]], value)
        if isinstance(value, list):
            return [self.resolve(one) for one in value]
        if isinstance(value, dict):
            if set(value) == {"repeat", "times"}:
                return value["repeat"] * value["times"]
            return {self.resolve(name): self.resolve(one) for name, one in value.items()}
        return value

    def hide(self, case: Line, reply: list[Line]) -> list[Line]:
        """A reply by names. `names` of the case are those of ids that appear here first, in order."""
        new: dict[str, str] = {}
        wanted = iter(case.get("names", ()))

        def name(id_: str) -> str:
            for known in (self._by_id, new):
                if id_ in known:
                    return known[id_]
            new[id_] = next(wanted, "") or f"id {len(new) + 1}"
            return new[id_]

        def digits(found: re.Match[str]) -> str:
            for id_, named in (*self._by_id.items(), *new.items()):
                if id_.startswith(found[0]) and not id_.startswith("000000"):
                    return f"<{named}: {len(found[0])} digits>"
            return found[0]

        def hidden(value: Any) -> Any:
            if isinstance(value, str):
                text = _TIME.sub("<time>", _ID.sub(lambda found: f"<{name(found[0])}>", value))
                return _DIGITS.sub(digits, text)
            if isinstance(value, list):
                return [hidden(one) for one in value]
            if isinstance(value, dict):
                return {hidden(key): self._token(key, one) or hidden(one) for key, one in value.items()}
            return value

        told = [hidden(line) for line in reply]
        self._ids |= {named: id_ for id_, named in new.items() if not named.startswith("id ")}
        return told

    @property
    def _by_id(self) -> dict[str, str]:
        return {id_: named for named, id_ in self._ids.items()}

    def _token(self, key: str, value: Any) -> str | None:
        """A page's token is always `<next page>`."""
        if key != "next_page_token" or not value:
            return None
        self._ids["next page"] = value
        return "<next page>"


def walk(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """All members of objects, as the object and the name, outer ones first."""
    if isinstance(value, dict):
        for key in list(value):
            yield value, key
            if key in value:
                yield from walk(value[key])
    elif isinstance(value, list):
        for one in value:
            yield from walk(one)


def hide_seeds(request: Line, reply: list[Line]) -> None:
    """Seeds that the server drew are not told: the request gives none."""
    if not any(key == "seed" for _, key in walk(request)):
        for place, key in walk(reply):
            if key == "seed" and place[key]:
                place[key] = "<seed>"


def hide_call_ids(reply: list[Line]) -> None:
    """Ids of calls, which are drawn anew, are told by the order in which they appear."""
    seen: dict[str, str] = {}
    for place, key in walk(reply):
        value = place[key]
        if key in ("id", "call_id", "item_id") and isinstance(value, str) and _CALL_ID.fullmatch(value):
            place[key] = seen.setdefault(value, f"<call {len(seen) + 1}>")


def hide_work_beyond_stops(request: Line, reply: list[Line]) -> None:
    """Where a stop string ends an answer, how far the engine had gone beyond it depends on time."""
    if any(key == "stop" and place[key] for place, key in walk(request)):
        for place, key in walk(reply):
            if key in ("timings", "selection", "fraction_of_keys"):
                place[key] = "<as far as it came>"
