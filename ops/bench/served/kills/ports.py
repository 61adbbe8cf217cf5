"""The verbs over HTTP, and which failures only say that somebody was killed."""

from __future__ import annotations

import json
from typing import Any

import httpx

from decode_engine.errors import NotReadyError, ServerUnreachableError, ShuttingDownError
from index_store.errors import ContextHasChildrenError, ContextNotFoundError, SparseKVError

_TIMEOUT_S = 60.0
_DOWN = frozenset({"unreachable", "not_ready", "shutting_down"})


class Gone(Exception):  # noqa: N818  expected here
    """Whoever was asked was killed, or is not up again."""


class Web:
    """The service over one HTTP port. All verbs raise Gone where nobody is there."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S)

    def create(self, title: str, text: str | None, file: str | None) -> str:
        """The operation that makes a context of a text or a file."""
        source = {"text": text} if file is None else {"file_id": file}
        order = {**source, "display_name": title, "request_id": f"order {title}"}
        return f"operations/{self._send('POST', '/v1/contexts', json=order)['id']}"

    def upload(self, text: str) -> str:
        """The id of a file."""
        form = {"files": {"file": ("text.txt", text.encode())}, "data": {"purpose": "user_data"}}
        return str(self._send("POST", "/v1/files", **form)["id"])

    def cancel(self, operation: str) -> None:
        self._send("POST", f"/v1/{operation}/cancel")

    def label(self, context: str, value: str) -> None:
        self._send("PATCH", f"/v1/{context}", json={"labels": {"mark": value}})

    def delete(self, context: str) -> None:
        """Raises ContextHasChildrenError. A context that is not there has been deleted before."""
        try:
            self._send("DELETE", f"/v1/{context}")
        except ContextNotFoundError:
            return

    def ask(self, context: str, prompt: str, tokens: int) -> str:
        """A streamed answer, whole."""
        body = {"context": context, "prompt": prompt, "max_tokens": tokens, "temperature": 0.7, "seed": 7}
        texts: list[str] = []
        try:
            with self._http.stream(
                "POST", "/v1/completions", json={**body, "model": "reader", "stream": True}
            ) as reply:
                if reply.is_error:
                    reply.read()
                    raise _error(reply.json()["error"])
                for line in reply.iter_lines():
                    if line == "data: [DONE]":
                        return "".join(texts)
                    if line.startswith("data: "):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise _error(chunk["error"])
                        texts += [choice["text"] for choice in chunk["choices"]]
        except httpx.TransportError as error:
            raise Gone(str(error)) from error
        raise Gone("the stream ended without its last word")

    def _send(self, method: str, path: str, **parts: Any) -> dict[str, Any]:
        try:
            reply = self._http.request(method, path, **parts)
        except httpx.TransportError as error:
            raise Gone(str(error)) from error
        body: dict[str, Any] = reply.json()
        if reply.is_error:
            raise _error(body["error"])
        return body


def broken_off(error: Exception) -> bool:
    """Whether a call failed only because somebody was killed or is not up again."""
    return isinstance(error, Gone | ServerUnreachableError | NotReadyError | ShuttingDownError)


def _error(error: dict[str, Any]) -> Exception:
    code, message = error["code"], error["message"]
    if code in _DOWN:
        return Gone(message)
    kinds: dict[str, type[SparseKVError]] = {
        "context_not_found": ContextNotFoundError,
        "context_has_children": ContextHasChildrenError,
    }
    return kinds.get(code, SparseKVError)(f"{code}: {message}")
