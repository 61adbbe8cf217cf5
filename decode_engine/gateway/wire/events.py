"""Server-sent events as text."""

from __future__ import annotations

import json
from typing import Any


def event(data: Any, name: str | None = None) -> str:
    """One event: its data as JSON, or a text as it is."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"
