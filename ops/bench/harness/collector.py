"""A collector of spans that reads them and drops them, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection


@contextmanager
def collector() -> Iterator[str]:
    """Where spans may be sent, which are read and dropped by a process of its own."""
    context = get_context("spawn")
    there, mine = context.Pipe()
    process = context.Process(target=_collect, args=(mine,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{there.recv()}"
    finally:
        process.terminate()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


def _collect(pipe: Connection) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        pipe.send(server.server_address[1])
        server.serve_forever()
