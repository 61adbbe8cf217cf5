"""All that tells others what the engine's half of a server does: metrics, events of what it holds, spans."""

from __future__ import annotations

from dataclasses import dataclass

from decode_engine.core.kv_events import KVEvents
from decode_engine.core.metrics import Exporter
from decode_engine.core.request_spans import RequestSpans
from decode_engine.engine.reply import Reply
from decode_engine.orders.order import Order


@dataclass(frozen=True, slots=True)
class Seeing:
    """None of what nobody wants, which then costs nothing."""

    exporter: Exporter | None = None
    kv_events: KVEvents | None = None
    spans: RequestSpans | None = None

    def watch(self, order: Order, reply: Reply, arrived_ns: int) -> None:
        """Follows a request by what it is told."""
        if self.exporter is not None:
            self.exporter.metrics.watch(reply, arrived_ns)
        if self.spans is not None:
            self.spans.watch(order, reply, arrived_ns)

    def close(self) -> None:
        """Ends what was started."""
        for each in (self.exporter, self.kv_events, self.spans):
            if each is not None:
                each.close()
