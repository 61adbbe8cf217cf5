"""Why an answer came as it did: one record, for replies over gRPC and HTTP, and for the log."""

from __future__ import annotations

from msgspec import Struct

from decode_engine.orders.events import Begins, Ends, Lookup, Tier
from decode_engine.orders.order import Order


class Explanation(Struct, frozen=True):
    """Under the names of the API's Explanation, which says what each member means."""

    lookup: Lookup
    context: str
    cached_tokens: int
    missed: str
    missed_context: str
    missed_tokens: int
    tier: Tier
    method: str
    method_reason: str
    door_ms: float
    load_ms: float
    queue_ms: float
    prompt_ms: float
    decode_ms: float
    audited_steps: int
    audited_kl: float

    @classmethod
    def of(cls, order: Order, begins: Begins, end: Ends, before_ns: int) -> Explanation:
        """Of an answer. before_ns: from the arrival of the call to that of the order at the engine."""
        missed, times = begins.missed, end.times
        audited = end.figures.get("audited", 0)
        chosen = (
            "the request names it"
            if order.method
            else "it is what the context, or the server, has for requests"
        )
        return cls(
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
