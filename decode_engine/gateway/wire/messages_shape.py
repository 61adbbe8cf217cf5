"""Messages as OpenAI's endpoints spell them, and as their clients send back what they were told.

What was said before is history: it is worded as it is or left out, and nobody checks whether it could be done again.
"""

from __future__ import annotations

from typing import Any

from decode_engine.gateway.wire.parameters import (
    CONTENT,
    JSON_TEXT,
    OBJECTS,
    Members,
    Parameter,
    Variants,
    refused,
    taken,
)
from decode_engine.orders.kinds import OBJECT, TEXT
from index_store.models.conversation.messages import Message, read_turns

_ONLY_TEXT = "models here read and write text"
_THOUGHTS = "what was thought before an earlier answer is not repeated"
_MEDIA = (
    *(
        "image",
        "images",
        "image_url",
        "audio",
        "input_audio",
        "video",
        "videos",
        "file",
        "files",
        "documents",
    ),
    *("attachments", "experimental_attachments", "parts"),
)
"""Members that carry what is said elsewhere than in the content."""

TEXT_PART = Members(
    "a part of text",
    (
        Parameter("text", TEXT, "The text; parts follow each other without anything between them."),
        *(refused(name, _ONLY_TEXT) for name in _MEDIA),
    ),
    others_taken=True,
)
_REFUSAL_PART = Members(
    "a part that refuses", (Parameter("refusal", TEXT, "What was said."),), others_taken=True
)
_LEFT_OUT = f"taken: {_THOUGHTS}"
PART = Variants(
    "type",
    {
        **dict.fromkeys(("text", "input_text", "output_text", "summary_text"), TEXT_PART),
        "refusal": _REFUSAL_PART,
        **dict.fromkeys(("thinking", "redacted_thinking", "reasoning", "reasoning_text"), _LEFT_OUT),
        **dict.fromkeys(
            (
                *("image_url", "input_image", "image", "input_audio", "audio"),
                *("file", "input_file", "video_url"),
            ),
            f"{_ONLY_TEXT}; expected text",
        ),
    },
    usual="text",
)

_CALLED = (
    Parameter("name", TEXT, "The tool's name."),
    Parameter("arguments", JSON_TEXT, "What it was called with; of a call that was cut, as far as it came."),
    Parameter("input", TEXT, "The same of a tool without a schema."),
)
CALL = Members(
    "a call in a message",
    (
        Parameter("type", TEXT, "`function` or `custom`."),
        Parameter("id", TEXT, "By which the tool's answer names it."),
        Parameter("function", OBJECT, "What was called.", inside=Members("what was called", _CALLED, True)),
        Parameter(
            "custom",
            OBJECT,
            "The same of a tool without a schema.",
            inside=Members("what was called", _CALLED, True),
        ),
        *_CALLED[:2],
    ),
    others_taken=True,
)
_CONTENT = Parameter("content", CONTENT, "What is said.", inside=PART)
_NAME = Parameter("name", TEXT, "Of the speaker; taken where the model's template does not say it.")
_SAID = Members(
    "a message of a system, a developer or a user",
    (
        _CONTENT,
        _NAME,
        *(refused(name, _ONLY_TEXT) for name in _MEDIA),
        refused("tool_calls", "a message of an assistant has it"),
        refused("tool_call_id", "a message of a tool has it"),
    ),
    others_taken=True,
)
_ANSWERED = Members(
    "a message of an assistant",
    (
        _CONTENT,
        _NAME,
        Parameter("refusal", TEXT, "What was said instead of a content."),
        Parameter("tool_calls", OBJECTS, "Calls of tools that it made.", inside=CALL),
        Parameter(
            "function_call",
            OBJECT,
            "The older way to say a call.",
            inside=Members("what was called", _CALLED, True),
        ),
        *taken("reasoning_content reasoning reasoning_details thinking_blocks", _THOUGHTS),
    ),
    others_taken=True,
)
_GIVEN = Members(
    "a message of a tool",
    (
        _CONTENT,
        Parameter("tool_call_id", TEXT, "Which call it answers."),
        Parameter("name", TEXT, "Of the tool; templates name it, the call, or neither."),
    ),
    others_taken=True,
)
MESSAGE = Variants(
    "role",
    {
        **dict.fromkeys(("system", "developer", "user"), _SAID),
        "assistant": _ANSWERED,
        **dict.fromkeys(("tool", "function"), _GIVEN),
    },
)


def turns_of(messages: list[dict[str, Any]]) -> tuple[Message, ...]:
    """Messages that the tables have read. Raises InvalidArgumentError, which names the part that cannot be used."""
    return read_turns([_plain(message) for message in messages])


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content as one text, and its calls in one spelling."""
    kept: dict[str, Any] = {name: message[name] for name in ("name", "tool_call_id") if name in message}
    role, calls = message["role"], list(message.get("tool_calls", ()))
    if "function_call" in message:
        calls.append(message["function_call"])
    if calls:
        kept["tool_calls"] = [called(call) for call in calls]
    said = message.get("content", message.get("refusal", ""))
    return {**kept, "role": "tool" if role == "function" else role, "content": text_of(said)}


def called(call: dict[str, Any]) -> dict[str, Any]:
    """A call, flat."""
    inner = call.get("function") or call.get("custom") or call
    arguments = inner.get("arguments", inner.get("input", ""))
    return {"id": call.get("id", ""), "name": inner.get("name", ""), "arguments": arguments}


def text_of(content: str | list[Any]) -> str:
    """The text of what the tables have read."""
    if isinstance(content, str):
        return content
    parts = (part for part in content if part is not None)
    return "".join(
        part if isinstance(part, str) else part.get("text", part.get("refusal", "")) for part in parts
    )
