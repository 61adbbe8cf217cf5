"""Plays recorded requests at the HTTP door.

Replies are compared byte for byte, but for ids, times, and how tokens share the events of a stream: what was sent has
to be what JSON's writer makes of its values (`json` says with which separators), and these are compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx

from tests.decode_engine.pins.recording import Line, hide_call_ids, hide_seeds, hide_work_beyond_stops, walk

_SEPARATORS = {"compact": (",", ":"), "spaced": (", ", ": ")}
_UNTOLD_HEADERS = {"date", "content-length", "x-request-id", "retry-after-ms"}
_TIMES = ("created", "created_at", "completed_at", "expires_at")
_EVENT = re.compile(r"(?:event: (?P<event>[^\n]+)\n)?data: (?P<data>[^\n]*)\Z")


def play_request(web: httpx.Client, head: Line) -> list[Line]:
    """Status and headers of a reply, and its body, or the events of its stream."""
    method, path = head["http"].split(" ", 1)
    content = head["text"].encode() if "text" in head else None
    if "body" in head:
        content = json.dumps(head["body"]).encode()
    reply = web.request(method, path, content=content, headers=head.get("headers"))
    if "x-request-id" not in reply.headers:
        raise AssertionError(f"{head['case']}: no x-request-id among {dict(reply.headers)}")
    headers = {
        name: _header(name, value) for name, value in reply.headers.items() if name not in _UNTOLD_HEADERS
    }
    told: Line = {"status": reply.status_code, "headers": headers}
    if headers.get("content-type", "").startswith("text/event-stream"):
        events = list(_events(reply.text))
        told["json"] = _written([raw for _, raw in events if raw != "[DONE]"])
        lines = [_line(name, raw) for name, raw in events]
        _check_numbers(lines)
        lines = _joined(lines)
    elif headers.get("content-type", "").startswith("application/json"):
        told["json"] = _written([reply.text])
        lines = [{"body": json.loads(reply.text)}]
    else:
        lines = [{"text": reply.text}] if reply.text else []
    hide_seeds(head, lines)
    hide_work_beyond_stops(head, lines)
    _hide_times(lines)
    hide_call_ids(lines)
    return [told, *lines]


def _header(name: str, value: str) -> str:
    return "<seconds>" if name == "retry-after" else value


def _written(texts: list[str]) -> str:
    """How values are written; `otherwise` where no writer of JSON that is known here makes exactly these texts."""
    values = [json.loads(text) for text in texts]
    for name, separators in _SEPARATORS.items():
        if [json.dumps(value, ensure_ascii=False, separators=separators) for value in values] == texts:
            return name
    return "otherwise"


def _events(text: str) -> Iterator[tuple[str | None, str]]:
    """Names and data. Raises AssertionError for what no stream of events has."""
    *frames, rest = text.split("\n\n")
    assert rest == "", rest[:200]
    for frame in frames:
        if frame.startswith(":"):  # a comment, so that nobody in between gives up
            continue
        found = _EVENT.match(frame)
        assert found is not None, frame[:200]
        yield found["event"], found["data"]


def _line(name: str | None, raw: str) -> Line:
    data = raw if raw == "[DONE]" else json.loads(raw)
    return {"data": data} if name is None else {"event": name, "data": data}


def _check_numbers(lines: list[Line]) -> None:
    """Numbers of events count up from 0. They are left out, as events are joined."""
    numbered = [
        line["data"] for line in lines if isinstance(line["data"], dict) and "sequence_number" in line["data"]
    ]
    assert [data.pop("sequence_number") for data in numbered] == list(range(len(numbered)))


def _joined(lines: list[Line]) -> list[Line]:
    """Pieces of one answer as one event, those of several answers in the order of these."""
    parts = [part for line in lines for part in _parts(line)]
    runs: list[list[Line]] = []
    for part in parts:
        if runs and _is_piece(part) and _is_piece(runs[-1][-1]):
            runs[-1].append(part)
        else:
            runs.append([part])
    joined: list[Line] = []
    for run in runs:
        for part in sorted(run, key=_answer) if len(run) > 1 else run:
            if not (joined and _append(joined[-1], part)):
                joined.append(part)
    return joined


def _choice(line: Line) -> dict[str, Any] | None:
    data = line["data"]
    choices = data.get("choices") if isinstance(data, dict) else None
    return choices[0] if choices else None


def _answer(line: Line) -> int:
    choice = _choice(line)
    return 0 if choice is None else int(choice["index"])


def _is_piece(line: Line) -> bool:
    """Whether it carries a part of an answer, neither its beginning nor its end."""
    choice = _choice(line)
    if choice is None:
        return str(line.get("event", "")).endswith(".delta")
    return choice["finish_reason"] is None and "role" not in choice.get("delta", {})


def _parts(line: Line) -> Iterator[Line]:
    """A chunk with text and several parts of calls as one chunk for each."""
    choice = _choice(line)
    delta = {} if choice is None else choice.get("delta", {})
    if choice is None or "tool_calls" not in delta:
        yield line
        return
    pieces = [{"content": delta["content"]}] if delta.get("content") else []
    pieces += [{"tool_calls": [part]} for part in delta["tool_calls"]]
    for piece in pieces:
        chunk = {**line["data"], "choices": [{**choice, "delta": piece}]}
        yield {**line, "data": chunk}


def _append(line: Line, more: Line) -> bool:
    """Joins two pieces, if they are of one text or one call."""
    if not (_is_piece(line) and _is_piece(more)) or line.get("event") != more.get("event"):
        return False
    mine, other = line["data"], more["data"]
    if "choices" not in mine:
        if _without(mine, "delta") != _without(other, "delta"):
            return False
        mine["delta"] += other["delta"]
        return True
    one, two = mine["choices"][0], other["choices"][0]
    if one["index"] != two["index"] or _without(mine, "choices") != _without(other, "choices"):
        return False
    for place, name, place_two in _texts(one, two):
        if name in place and name in place_two:
            place[name] += place_two[name]
            _join_logprobs(one, two)
            return True
    return False


def _texts(one: Any, two: Any) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Where pieces may have text of the same kind."""
    yield one, "text", two
    if "delta" in one:
        mine, other = one["delta"], two["delta"]
        yield mine, "content", other
        (call,), (more,) = mine.get("tool_calls", [{}]), other.get("tool_calls", [{}])
        if "id" not in more and call.get("index") == more.get("index"):
            yield call.get("function", {}), "arguments", more.get("function", {})


def _join_logprobs(one: Any, two: Any) -> None:
    if one.get("logprobs") and two.get("logprobs"):
        for name, values in two["logprobs"].items():
            if isinstance(values, list):
                one["logprobs"][name] += values


def _without(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: one for key, one in value.items() if key != name}


def _hide_times(lines: list[Line]) -> None:
    for place, key in walk(lines):
        if key in _TIMES and isinstance(place[key], int) and place[key]:
            place[key] = "<time>"
        elif key.endswith("_ms"):
            place[key] = "<ms>"
        elif key == "bytes_written":
            place[key] = "<bytes>"
