"""Source texts, words and lengths that tasks are made from."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from index_store.errors import InvalidArgumentError

_PACKAGE = "decode_engine.evaluation"


def parse_length(text: str) -> int:
    """Tokens: a number, or one with k for 1,024 ("32k"). Raises InvalidArgumentError."""
    found = re.fullmatch(r"(\d+)(k?)", text.strip().lower())
    if not found or int(found[1]) == 0:
        raise InvalidArgumentError(f"length is {text!r}, expected a number of tokens such as 8192 or 8k")
    return int(found[1]) * (1024 if found[2] else 1)


def held_out_text() -> str:
    """Three public-domain novels that the embedded reader was not trained on, about 395,000 of its tokens."""
    return lzma.decompress((files(_PACKAGE) / "data" / "held_out_novels.txt.xz").read_bytes()).decode()


def held_out_words() -> tuple[str, ...]:
    """1,000 common words that never named anything when the embedded reader was trained."""
    return tuple(json.loads((files(_PACKAGE) / "data" / "held_out_words.json").read_text()))


def read_text(path: Path) -> str:
    """A UTF-8 text file, line ends as "\\n". Raises InvalidArgumentError for other bytes, OSError without the file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{path} is not UTF-8 text: byte {error.start} cannot be decoded"
        ) from error


def source_text(paths: Sequence[Path]) -> str:
    """The files' texts, an empty line between them; the packaged novels without any file.

    Raises InvalidArgumentError for an empty file, else as `read_text`.
    """
    texts = [read_text(path) for path in paths]
    for path, text in zip(paths, texts, strict=True):
        if not text.strip():
            raise InvalidArgumentError(f"text {path} is empty; expected words to make a document of")
    return "\n\n".join(texts) if texts else held_out_text()
