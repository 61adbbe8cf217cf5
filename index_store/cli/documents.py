"""Texts that commands are given: files and standard input, joined, and what to call them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Conversation, read_conversation

STANDARD_INPUT = Path("-")


def read_document(paths: Sequence[Path], standard_input: BinaryIO) -> str:
    """The text of all inputs in order; a line break separates two inputs unless the first one ends with its own.

    Raises InvalidArgumentError for a missing, unreadable, undecodable or empty input, naming it.
    """
    if list(paths).count(STANDARD_INPUT) > 1:
        raise InvalidArgumentError("standard input (-) is given more than once; it can be read only once")
    text = ""
    for path in paths:
        part = decode_text(_label(path), _read_bytes(path, standard_input))
        if not part.strip():
            raise InvalidArgumentError(f"input {_label(path)} is empty; expected text")
        text += part if not text or text.endswith("\n") else "\n" + part
    return text


def read_messages(path: Path, standard_input: BinaryIO) -> Conversation:
    """The conversation in a JSON file: a list of messages, or an object of `messages` and perhaps `tools`.

    Raises InvalidArgumentError for a file that cannot be used, and names the file and the part.
    """
    text = decode_text(_label(path), _read_bytes(path, standard_input))
    try:
        return read_conversation(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"--messages: {_label(path)} is not JSON: {error}") from None
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"--messages: {_label(path)}: {error.message}", **error.metadata) from None


def document_name(paths: Sequence[Path]) -> str:
    """A display name for the context: the first input's file name without its suffix."""
    name = "standard input" if paths[0] == STANDARD_INPUT else paths[0].stem
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:200] or "unnamed"


def read_text(path: Path, standard_input: BinaryIO | None = None) -> str:
    """The text of one input. Raises as `read_document` does, but for an empty one."""
    return decode_text(_label(path), _read_bytes(path, standard_input))


def _read_bytes(path: Path, standard_input: BinaryIO | None) -> bytes:
    if path == STANDARD_INPUT and standard_input is not None:
        return standard_input.read()
    if path.is_dir():
        raise InvalidArgumentError(f"input {path} is a folder; pass text files")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"input {path} cannot be read: {error.strerror}") from error


def decode_text(label: str, data: bytes) -> str:
    """The text of an input's bytes, without a byte order mark. Raises InvalidArgumentError, which names the label."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"input {label} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}); convert it first"
        ) from None


def _label(path: Path) -> str:
    return "standard input" if path == STANDARD_INPUT else str(path)
