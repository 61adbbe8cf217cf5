"""What a job reads: the document, and example prompts for calibration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from index_store.errors import InvalidArgumentError
from index_store.models.loading import Tokenizer

STANDARD_INPUT = Path("-")


def read_document(paths: Sequence[Path], standard_input: BinaryIO) -> str:
    """The text of all inputs in order; a line break separates two inputs unless the first one ends with its own.

    Raises InvalidArgumentError for a missing, unreadable, undecodable or empty input, naming it.
    """
    if list(paths).count(STANDARD_INPUT) > 1:
        raise InvalidArgumentError("standard input (-) is given more than once; it can be read only once")
    text = ""
    for path in paths:
        part = _decode(path, _read_bytes(path, standard_input))
        if not part.strip():
            raise InvalidArgumentError(f"input {_label(path)} is empty; expected text")
        text += part if not text or text.endswith("\n") else "\n" + part
    return text


def document_name(paths: Sequence[Path]) -> str:
    """A display name for the context: the first input's file name without its suffix."""
    name = "standard input" if paths[0] == STANDARD_INPUT else paths[0].stem
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:200] or "unnamed"


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the example prompts in a calibration file.

    Plain text: one question per line, worded by the model's chat template. `.jsonl`: one object per line, either
    {"question": text} (worded by the chat template) or {"prompt": text} (taken word for word).
    Raises InvalidArgumentError naming file and line of what cannot be used.
    """
    text = _decode(path, _read_bytes(path, None))
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        prompt = _json_prompt(line, where, tokenizer) if path.suffix == ".jsonl" else line.strip()
        if path.suffix != ".jsonl":
            prompt = tokenizer.format_question(prompt)
        ids = tokenizer.encode(prompt)
        if not ids:
            raise InvalidArgumentError(f"{where}: the prompt is empty")
        prompts.append(ids)
    if not prompts:
        raise InvalidArgumentError(f"calibration file {path} has no prompts; expected one per line")
    return prompts


def fingerprint_prompts(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 over the prompts' token ids; empty without prompts."""
    if not prompts:
        return ""
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()


def _json_prompt(line: str, where: str, tokenizer: Tokenizer) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidArgumentError(f"{where}: not JSON: {error}") from None
    given = sorted(entry) if isinstance(entry, dict) else None
    if given not in (["prompt"], ["question"]) or not isinstance(entry[given[0]], str):
        raise InvalidArgumentError(
            f'{where}: expected {{"prompt": text}} or {{"question": text}}, got {line.strip()[:80]}'
        )
    text: str = entry[given[0]]
    return tokenizer.format_question(text) if given == ["question"] else text


def _read_bytes(path: Path, standard_input: BinaryIO | None) -> bytes:
    if path == STANDARD_INPUT and standard_input is not None:
        return standard_input.read()
    if path.is_dir():
        raise InvalidArgumentError(f"input {path} is a folder; pass text files")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"input {path} cannot be read: {error.strerror}") from error


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"input {_label(path)} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}); "
            "convert it first"
        ) from None


def _label(path: Path) -> str:
    return "standard input" if path == STANDARD_INPUT else str(path)
