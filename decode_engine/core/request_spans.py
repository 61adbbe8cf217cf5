"""The engine's spans of a request, made once it is over, of what it was told: load, queue, prompt and decode."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from decode_engine.engine.reply import Reply
from decode_engine.orders.events import Begins, Ends, Event, Fails, Says
from decode_engine.orders.order import Order, Traced
from index_store.cli.traces import Traces, Value


@dataclass(slots=True)
class _Watched:
    """A request, from what it is told. arrived_ns: on the monotonic clock."""

    order: Order
    traced: Traced
    arrived_ns: int
    begins: Begins | None = None
    ends: list[Ends] = field(default_factory=list)


class RequestSpans:
    """Makes spans of requests that belong to some. Thread-safe."""

    def __init__(self, traces: Traces, model: str, prefill_of: Callable[[str], str]) -> None:
        """prefill_of: the span in which a context of that id was made, as a header; "" where nobody knows."""
        self._traces, self._model, self._prefill_of = traces, model, prefill_of
        # Which looks into the store, and takes time that the engine's thread has not.
        self._thread = ThreadPoolExecutor(1, "spans")

    def watch(self, order: Order, reply: Reply, arrived_ns: int) -> None:
        """Makes spans of a request, should it be part of a trace."""
        if order.traced is not None:
            reply.tell = partial(self._note, _Watched(order, order.traced, arrived_ns), reply.tell)

    def close(self) -> None:
        """Makes those that are to be made; the traces are whose they were."""
        self._thread.shutdown()

    def _note(self, watched: _Watched, tell: Callable[[Event], None], event: Event) -> None:
        tell(event)
        if isinstance(event, Says):
            return
        if isinstance(event, Begins):
            watched.begins = event
        elif isinstance(event, Ends):
            watched.ends.append(event)
            if len(watched.ends) == watched.order.answers:
                self._thread.submit(self._make, watched, "")
        elif isinstance(event, Fails):
            self._thread.submit(self._make, watched, event.reason)

    def _make(self, watched: _Watched, error: str) -> None:
        order, begins, ends, start = watched.order, watched.begins, watched.ends, watched.arrived_ns
        context = "" if begins is None else begins.context
        operation = watched.traced.operation
        span = self._traces.begin(
            f"{operation} {self._model}",
            watched.traced.parent,
            start,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "sparsekv",
                "gen_ai.request.model": self._model,
                **_asked(order),
            },
            link=self._prefill_of(context) if context else "",
        )
        for end in ends:
            times = end.times
            prompt_ns = start + times.load_ns + times.queue_ns
            decode_ns = prompt_ns + times.prompt_ns
            if end is ends[0]:
                span.child("load", start, start + times.load_ns)
                span.child("queue", start + times.load_ns, prompt_ns)
                span.child("prompt", prompt_ns, decode_ns)
            told: dict[str, Value] = {f"sparsekv.{name}": value for name, value in end.figures.items()}
            told |= {"sparsekv.answer": end.answer, "sparsekv.decode_steps": times.decode_steps}
            span.child("decode", decode_ns, decode_ns + times.after_prompt_ns, told)
        ended_ns = None if error else max(start + end.times.total_ns for end in ends)
        span.end({**_begun(begins), **_answered(ends)}, error, ended_ns)


def _asked(order: Order) -> dict[str, Value]:
    drawn = order.sampling
    told: dict[str, Value | None] = {
        "gen_ai.request.max_tokens": order.max_tokens,
        "gen_ai.request.choice.count": order.answers if order.answers > 1 else None,
        "gen_ai.request.temperature": drawn.temperature,
        "gen_ai.request.top_p": drawn.top_p,
        "gen_ai.request.top_k": drawn.top_k,
        "gen_ai.request.frequency_penalty": drawn.frequency_penalty,
        "gen_ai.request.presence_penalty": drawn.presence_penalty,
    }
    return {name: value for name, value in told.items() if value is not None}


def _begun(begins: Begins | None) -> dict[str, Value]:
    if begins is None:
        return {}
    return {
        "gen_ai.usage.input_tokens": begins.cached + begins.prompt,
        "gen_ai.usage.cache_read.input_tokens": begins.cached,
        "sparsekv.context": begins.context,
        "sparsekv.lookup": begins.lookup,
        "sparsekv.missed": "" if begins.missed is None else begins.missed.reason,
        "sparsekv.tier": begins.tier,
        "sparsekv.method": begins.method,
        "sparsekv.method_reason": begins.reason,
    }


def _answered(ends: list[Ends]) -> dict[str, Value]:
    if not ends:
        return {}
    return {
        "gen_ai.usage.output_tokens": sum(end.completion_tokens for end in ends),
        "gen_ai.response.finish_reasons": [
            "length" if end.reason == "length" else "stop" for end in sorted(ends, key=lambda end: end.answer)
        ],
        "gen_ai.response.time_to_first_chunk": min(end.times.first_token_ns for end in ends) / 1e9,
    }
