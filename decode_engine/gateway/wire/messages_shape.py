"""Messages as OpenAI's endpoints spell them, which know more roles and parts than there are here."""

from __future__ import annotations

from typing import Any

from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Message, read_turns

_ROLES = {"developer": "system"}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_MOST_PARTS = 4096
_EMPTY = frozenset({"refusal", "audio", "function_call", "annotations", "phase"})
"""Members of messages that replies have, and that say nothing where they are empty."""


def turns_of(messages: list[dict[str, Any]]) -> tuple[Message, ...]:
    """The messages. Raises InvalidArgumentError, which names the part that cannot be used."""
    return read_turns([_plain(number, message) for number, message in enumerate(messages)])


def _plain(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message without what asks for nothing, its content one text."""
    kept = {name: value for name, value in message.items() if not (name in _EMPTY and not value)}
    if kept.get("type", "message") == "message":
        kept.pop("type", None)
        for name in ("id", "status"):  # of messages that responses had
            kept.pop(name, None)
    role = kept.get("role")
    if isinstance(role, str):
        kept["role"] = _ROLES.get(role, role)
    content = kept.get("content")
    if isinstance(content, list):
        kept["content"] = text_of(f"messages[{number}].content", content)
    return kept


def text_of(where: str, parts: list[Any]) -> str:
    """The text of parts. Raises InvalidArgumentError, which names one that is none."""
    if len(parts) > _MOST_PARTS:
        raise InvalidArgumentError(
            f"{where} has {len(parts)} parts, expected at most {_MOST_PARTS}", field=where
        )
    return "".join(_part(f"{where}[{place}]", part) for place, part in enumerate(parts))


def _part(where: str, part: Any) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if not (isinstance(kind, str) and kind in _TEXT_PARTS and isinstance(text, str)):
        raise InvalidArgumentError(f"{where} is no text; models here read and write text", field=where)
    for name, value in part.items():
        if name not in ("type", "text") and value:
            raise InvalidArgumentError(f"{where}.{name[:60]} is not supported; leave it out", field=where)
    return text
