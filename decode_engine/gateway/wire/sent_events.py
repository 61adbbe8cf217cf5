"""What is sent: JSON of Structs, whole or as server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

ENCODER = msgspec.json.Encoder()


class JsonReply(Response):
    """A value or a Struct as the body of a response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return ENCODER.encode(content)


def event(data: Any, name: str | None = None) -> bytes:
    """One event: its data as JSON, or a text as it is."""
    text = data.encode() if isinstance(data, str) else ENCODER.encode(data)
    return b"data: %b\n\n" % text if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), text)
