"""A collector of spans, as OpenTelemetry's: it takes them over HTTP, and writes lines of JSON into a file."""

from __future__ import annotations

import base64
import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Told:
    """A span. parent: its id, "" of one that has none. links: ids of traces and spans. pid: of its process."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    kind: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    pid: int
    failed: bool


@dataclass(frozen=True)
class Collector:
    """Where it listens, and the file that it writes."""

    url: str
    file: Path

    def spans(self, trace: str = "") -> list[Told]:
        """Those of a trace, by their beginnings; all of them without one."""
        found: list[Told] = []
        for line in self.file.read_text().splitlines():
            for resource in json.loads(line)["resourceSpans"]:
                (pid,) = (
                    int(each["value"]["intValue"])
                    for each in resource["resource"]["attributes"]
                    if each["key"] == "process.pid"
                )
                found += (_told(span, pid) for scope in resource["scopeSpans"] for span in scope["spans"])
        return sorted(
            (span for span in found if trace in ("", span.trace)), key=lambda span: (span.start, span.end)
        )


def _told(span: dict[str, Any], pid: int) -> Told:
    return Told(
        span["name"],
        _hex(span["traceId"]),
        _hex(span["spanId"]),
        _hex(span.get("parentSpanId", "")),
        int(span["startTimeUnixNano"]),
        int(span["endTimeUnixNano"]),
        span["kind"],
        {each["key"]: _value(each["value"]) for each in span.get("attributes", ())},
        [(_hex(each["traceId"]), _hex(each["spanId"])) for each in span.get("links", ())],
        pid,
        span.get("status", {}).get("code") == 2,
    )


def _hex(told: str) -> str:
    return base64.b64decode(told).hex()


def _value(told: dict[str, Any]) -> Any:
    ((kind, value),) = told.items()
    if kind == "arrayValue":
        return [_value(each) for each in value["values"]]
    return int(value) if kind == "intValue" else value


@contextmanager
def collecting(folder: Path) -> Iterator[Collector]:
    """A collector on a free port, inside the block."""
    file, lock = folder / "spans.jsonl", threading.Lock()
    file.touch()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            told = MessageToJson(
                ExportTraceServiceRequest.FromString(body), indent=None, use_integers_for_enums=True
            )
            with lock, file.open("a") as lines:
                lines.write(told + "\n")
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Collector(f"http://127.0.0.1:{server.server_address[1]}", file)
        server.shutdown()
