"""What a job reads besides its document: example prompts for calibration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from index_store.cli.documents import read_text
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Message, Role
from index_store.models.loading import Tokenizer


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the example prompts in a calibration file.

    Plain text: one question per line, worded by the model's chat template. `.jsonl`: one object per line, either
    {"question": text} (worded by the chat template) or {"prompt": text} (taken word for word). An "answer" beside it,
    as `make-document --questions` writes it, is passed over.
    Raises InvalidArgumentError naming file and line of what cannot be used.
    """
    try:
        text = read_text(path)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"--calibration: {error.message}") from error
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        jsonl = path.suffix == ".jsonl"
        ids = _json_prompt(line, where, tokenizer) if jsonl else _question(line.strip(), tokenizer)
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


def _question(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_turns((Message(Role.USER, text),)) if text else []


def _json_prompt(line: str, where: str, tokenizer: Tokenizer) -> list[int]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidArgumentError(f"{where}: not JSON: {error}") from None
    given = sorted(set(entry) - {"answer"}) if isinstance(entry, dict) else []
    if given not in (["prompt"], ["question"]) or not isinstance(entry[given[0]], str):
        found = f"the members {', '.join(map(ascii, given))[:80]}" if len(given) > 1 else line.strip()[:80]
        raise InvalidArgumentError(
            f'{where}: expected {{"prompt": text}} or {{"question": text}}, perhaps with an "answer", got {found}'
        )
    text: str = entry[given[0]]
    return _question(text, tokenizer) if given == ["question"] else tokenizer.encode_behind(text)
