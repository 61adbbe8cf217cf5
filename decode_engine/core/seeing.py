"""All that tells others what the engine's half of a server does: metrics, events of what it holds, spans."""

from __future__ import annotations

import random
from dataclasses import dataclass

from decode_engine.core.kv_events import KVEvents
from decode_engine.core.metrics import Exporter
from decode_engine.core.request_spans import RequestSpans
from decode_engine.engine.reply import Reply
from decode_engine.orders.order import Order
from index_store.methods.method import FittedMethod


@dataclass(frozen=True, slots=True)
class Seeing:
    """None of what nobody wants, which then costs nothing. audit_share: of answers of methods that search."""

    exporter: Exporter | None = None
    kv_events: KVEvents | None = None
    spans: RequestSpans | None = None
    audit_share: float = 0.0

    def watch(self, order: Order, reply: Reply, arrived_ns: int) -> None:
        """Follows a request by what it is told."""
        if self.exporter is not None:
            self.exporter.metrics.watch(reply, arrived_ns)
        if self.spans is not None:
            self.spans.watch(order, reply, arrived_ns)

    def audits(self, fitted: FittedMethod, order: Order, device: str) -> bool:
        """Whether the steps of an answer are to be compared with full attention; drawn anew for each.

        Not of methods that leave nothing out. An audited answer takes the general path, which rounds otherwise on a
        GPU: there a seed does not allow it.
        """
        seeded = order.sampling.seed is not None and device != "cpu"
        leaves_out = bool(fitted.searching) and fitted.drafting is None
        return leaves_out and not seeded and random.random() < self.audit_share

    def close(self) -> None:
        """Ends what was started."""
        for each in (self.exporter, self.kv_events, self.spans):
            if each is not None:
                each.close()
