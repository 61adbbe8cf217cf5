"""Messages as OpenAI's endpoints spell them, which know more roles and parts than there are here."""

from __future__ import annotations

from typing import Any

from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Message, read_turns

_ROLES = {"developer": "system"}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
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
        where = f"messages[{number}].content"
        kept["content"] = "".join(_part(f"{where}[{place}]", part) for place, part in enumerate(content))
    return kept


def _part(where: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidArgumentError(f"{where} is no text; models here read and write text", field=where)
