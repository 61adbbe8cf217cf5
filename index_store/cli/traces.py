"""OpenTelemetry's spans, sent to a collector that the environment names (`OTEL_EXPORTER_OTLP_ENDPOINT`).

Without one there is None in place of `Traces`, and nothing of opentelemetry is imported. Spans are made of times that
are known anyway, most of them once everything is over.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from index_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

Value = str | int | float | bool | Sequence[str]
Kind = Literal["server", "consumer", "internal"]

TRACEPARENT = "traceparent"
"""The header, or the metadata, of a call that names the span that it belongs to; in a manifest's notes, the span of the
prefill."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_CONTEXT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_CLOCK_LOOKS = 3


def trace_id(traceparent: str | None) -> str:
    """The trace's id, 32 hexadecimal digits, in a header of version 0; "" where there is none."""
    found = _CONTEXT.fullmatch(traceparent or "")
    return "" if found is None else found[1]


class Span:
    """One that was begun. traceparent: as the header has it, for what belongs to it elsewhere."""

    def __init__(self, traces: Traces, span: trace.Span, offset_ns: int) -> None:
        """offset_ns: of wall-clock time to the monotonic clock."""
        self._traces, self._span, self._offset_ns = traces, span, offset_ns
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(
        self, name: str, started_ns: int, ended_ns: int, attributes: Mapping[str, Value] | None = None
    ) -> None:
        """A part of it that is over; times as for `Traces.begin`."""
        parent = self._traces.context(self.traceparent)
        part = self._traces.tracer.start_span(
            name, parent, attributes=attributes, start_time=started_ns + self._offset_ns
        )
        part.end(ended_ns + self._offset_ns)

    def end(
        self, attributes: Mapping[str, Value] | None = None, error: str = "", ended_ns: int | None = None
    ) -> None:
        """It is over, by default now. error: the reason why it failed, "" where it did not."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(attributes or {})
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end((time.monotonic_ns() if ended_ns is None else ended_ns) + self._offset_ns)


class Traces:
    """What spans of this process are told to, until `close`. Thread-safe. tracer: the library's own."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self.tracer = provider.get_tracer("sparsekv")

    def begin(
        self,
        name: str,
        parent: str,
        started_ns: int,
        kind: Kind = "internal",
        attributes: Mapping[str, Value] | None = None,
        link: str = "",
    ) -> Span:
        """A span. parent, link: headers of spans, "" for none. started_ns: on the monotonic clock."""
        from opentelemetry.trace import Link, SpanKind, get_current_span

        links = [Link(get_current_span(self.context(link)).get_span_context())] if trace_id(link) else []
        offset_ns = _offset_ns()
        span = self.tracer.start_span(
            name, self.context(parent), SpanKind[kind.upper()], attributes, links, started_ns + offset_ns
        )
        return Span(self, span, offset_ns)

    def context(self, traceparent: str) -> Context:
        """That of a span of any process; an empty one of ""."""
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}, Context())

    def close(self, patience_s: float) -> None:
        """Sends what is not sent yet, for so long at most: a collector may not answer."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(patience_s)


def open_traces() -> Traces | None:
    """None where the environment names no collector, or says that there are to be no spans.

    Raises InvalidArgumentError for another protocol than HTTP, and where opentelemetry is not installed.
    """
    told = os.environ
    off = told.get("OTEL_SDK_DISABLED", "").lower() == "true" or told.get("OTEL_TRACES_EXPORTER") == "none"
    endpoint = next((name for name in _ENDPOINTS if told.get(name)), None)
    if off or endpoint is None:
        return None
    for name in _PROTOCOLS:
        if told.get(name, _PROTOCOL) != _PROTOCOL:
            raise InvalidArgumentError(
                f"{name} is {told[name]!r}, expected {_PROTOCOL}, which collectors take at port 4318"
            )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidArgumentError(
            f"{endpoint} is set, but {error.name} is not installed: pip install 'sparsekv[traces]', or set "
            "OTEL_SDK_DISABLED=true"
        ) from error
    name = told.get("OTEL_SERVICE_NAME", "sparsekv")
    resource = Resource.create({"service.name": name, "process.pid": os.getpid()})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)


def _offset_ns() -> int:
    """Of wall-clock time to the monotonic clock, by the look at both that was interrupted for least."""
    looks = []
    for _ in range(_CLOCK_LOOKS):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        looks.append((after - before, wall - (before + after) // 2))
    return min(looks)[1]
