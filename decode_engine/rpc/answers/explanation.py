"""Why an answer came as it did: one record, for replies over gRPC and HTTP, and for the log."""

from __future__ import annotations

from decode_engine.orders.events import Begins, Ends
from decode_engine.orders.order import Order
from sparsekv.v1.values import Explanation


def explanation(order: Order, begins: Begins, end: Ends, before_ns: int) -> Explanation:
    """Of an answer. before_ns: from the arrival of the call to that of the order at the engine."""
    missed, times = begins.missed, end.times
    audited = end.figures.get("audited", 0)
    chosen = (
        "the request names it" if order.method else "it is what the context, or the server, has for requests"
    )
    return Explanation(
        begins.lookup,
        begins.context,
        begins.cached,
        "" if missed is None else missed.reason,
        "" if missed is None else missed.context,
        0 if missed is None else missed.tokens,
        begins.tier,
        begins.method,
        begins.reason or chosen,
        before_ns / 1e6,
        times.load_ns / 1e6,
        times.queue_ns / 1e6,
        times.prompt_ns / 1e6,
        times.after_prompt_ns / 1e6,
        audited,
        end.figures["audited_kl_nanonats"] / 1e9 / audited if audited else 0.0,
    )
