"""All that tells others what the engine's half of a server does: metrics, spans of requests, events of what it holds.

Metrics are read by Prometheus, under the names that boards, autoscalers and routers of the field know. Everything is
counted in the engine's process, which sees every request of every door: from the events that a request is told, and
from what engine and memory count anyway. A label never names a context, a user or a request. Spans of a request are
made once it is over: load, queue, prompt and decode.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from decode_engine.core.housekeeping import BeginningStats
from decode_engine.core.kv_events import KVEvents
from decode_engine.engine.job import Reply
from decode_engine.engine.requests import EngineStats
from decode_engine.errors import AddressError, CancelledError
from decode_engine.orders.events import Begins, Ends, Event, Facts, Fails, Says
from decode_engine.orders.order import Order, Traced
from index_store.cli.traces import Traces, Value
from index_store.memory.arena import ArenaStats
from index_store.methods.method import FittedMethod

OURS, ALIAS = "sparsekv", "vllm"
_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily

_STEPS = (1.0, 2.5, 5.0)
_SECONDS = tuple(step * 10.0**power for power in range(-3, 3) for step in _STEPS)
_BETWEEN = tuple(step * 10.0**power for power in range(-4, 1) for step in _STEPS)
_TOKENS = tuple(step * 10.0**power for power in range(7) for step in (1.0, 2.0, 5.0))

_HISTOGRAMS = {
    "time_to_first_token_seconds": (_SECONDS, "From a request's arrival until its first token."),
    "inter_token_latency_seconds": (_BETWEEN, "Between two tokens of an answer."),
    "request_time_per_output_token_seconds": (
        _BETWEEN,
        "Mean time between the tokens of an answer, one for each answer.",
    ),
    "e2e_request_latency_seconds": (_SECONDS, "From a request's arrival until an answer's end."),
    "request_load_time_seconds": (_SECONDS, "Until a request's context was in memory."),
    "request_queue_time_seconds": (_SECONDS, "From then on until there was a session for the request."),
    "request_prefill_time_seconds": (_SECONDS, "Until the request's own prompt was read."),
    "request_decode_time_seconds": (_SECONDS, "From then on until an answer's end."),
    "request_prompt_tokens": (_TOKENS, "Tokens of a request's prompt, stored ones included."),
    "request_generation_tokens": (_TOKENS, "Tokens of an answer."),
}
_COUNTERS = {
    "prompt_tokens": ("Tokens of prompts, stored ones included.", ()),
    "generation_tokens": ("Tokens of answers.", ()),
    "request_success": ("Answers that ended, by why they did; abort: the client left.", ("finished_reason",)),
    "request_failures": ("Requests that ended by an error, by its reason.", ("reason",)),
    "prefix_cache_queries": ("Tokens of prompts that were looked for in the store.", ()),
    "prefix_cache_hits": ("Of these, tokens that were found there.", ()),
    "prompt_tokens_by_source": (
        "Tokens of prompts: read by the model (computed), of a named context (context), of a stored beginning that was "
        "found (beginning).",
        ("source",),
    ),
    "beginning_lookups": (
        "Requests by the stored context that they continue: named, found by the prompt's tokens, none.",
        ("result",),
    ),
    "beginning_misses": (
        "Requests without a named context, by why no longer stored beginning was used: not_stored, partial (one has "
        "more of the prompt, but goes on in another way), expired, too_large (for the memory), unreadable, "
        "not_looked_for (log probabilities of the whole prompt are wanted).",
        ("reason",),
    ),
    "requests_by_tier": (
        "Requests by where their contexts lay when they came: device, host, disk, none.",
        ("tier",),
    ),
    "requests_by_method": ("Requests by the method that decodes them.", ("method",)),
    "spec_decode_num_draft_tokens": ("Tokens that were drafted and verified.", ()),
    "spec_decode_num_accepted_tokens": ("Of these, tokens of answers.", ()),
    "keys_available": (
        "Keys that full attention would have read, over layers, heads and tokens.",
        ("method",),
    ),
    "keys_read": ("Keys that were read.", ("method",)),
}
_OF_NOW: Mapping[str, tuple[type[GaugeMetricFamily | CounterMetricFamily], str]] = {
    "num_requests_running": (_GAUGE, "Requests that read their prompts or decode."),
    "num_requests_waiting": (_GAUGE, "Requests that wait, or load their context."),
    "kv_cache_usage_perc": (_GAUGE, "Share of the sessions' memory that is spoken for, 0 to 1."),
    "context_memory_usage_perc": (_GAUGE, "Share of the contexts' memory that is taken, 0 to 1."),
    "contexts_in_memory": (_GAUGE, "Contexts that are wholly in memory."),
    "context_memory_bytes": (_GAUGE, "Memory that contexts take."),
    "context_memory_in_use_bytes": (_GAUGE, "Of that, what cannot be freed now."),
    "decode_batch": (_GAUGE, "Sessions that decoded in the latest step."),
    "context_loads": (_COUNTER, "Contexts that were brought into memory."),
    "kv_offload_load_bytes": (_COUNTER, "Bytes of contexts read from the store."),
    "context_hits": (_COUNTER, "Requests that found their context in memory."),
    "context_evictions": (_COUNTER, "Contexts that left memory for others."),
    "kept_beginnings": (_COUNTER, "Beginnings of prompts that became contexts."),
    "host_read_bytes": (_COUNTER, "Bytes that the device read from host memory."),
    "rows_reused": (_COUNTER, "Rows of host memory that were found on the device."),
    "contexts_mended": (_COUNTER, "Damaged contexts made whole from another tier."),
    "engine_steps": (_COUNTER, "Turns of the engine."),
    "decode_steps": (_COUNTER, "Turns in which somebody decoded."),
}
_AUDITED = "audited_kl_nats"
_OF_TENANTS = {
    "tenant_requests": ("requests", "Requests that were let in, by tenant: of the quotas' tables, or other."),
    "tenant_prompt_tokens": ("prompt_tokens", "Tokens of prompts that were read, by tenant."),
    "tenant_generation_tokens": ("generated_tokens", "Tokens that were generated, by tenant."),
    "tenant_refusals": ("refused", "Requests that a tenant's quota refused."),
}


class Histogram:
    """Counts of values by the least bound that is not below them. Not thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def note(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def told(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by bound, and the sum of all values."""
        rows, total = [], 0
        for bound, count in zip(
            (*(f"{bound:g}" for bound in self._bounds), "+Inf"), self._counts, strict=True
        ):
            total += count
            rows.append((bound, float(total)))
        return rows, self._sum


@dataclass(slots=True)
class Watched:
    """A request, from what it is told. last_ns: when each of its answers got a token."""

    arrived_ns: int
    begins: Begins | None = None
    last_ns: dict[int, int] = field(default_factory=dict)


class Metrics:
    """Counts what requests are told. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self.counters: dict[str, Counter[str]] = {name: Counter() for name in _COUNTERS}
        self._audited: Counter[str] = Counter()
        self._audited_kl: Counter[str] = Counter()  # in 1e-9 nats

    def watch(self, reply: Reply, arrived_ns: int) -> None:
        """Counts what a request is told from here on."""
        reply.tell = partial(self._note, Watched(arrived_ns), reply.tell)

    def _note(self, watched: Watched, tell: Callable[[Event], None], event: Event) -> None:
        if isinstance(event, Says | Begins | Ends | Fails):
            with self._lock:
                if isinstance(event, Says):
                    self._note_tokens(watched, event)
                elif isinstance(event, Begins):
                    watched.begins = event
                elif isinstance(event, Ends):
                    self._note_end(watched, event)
                else:
                    self._note_failure(event)
        tell(event)

    def _note_tokens(self, watched: Watched, event: Says) -> None:
        now = time.monotonic_ns()
        before = watched.last_ns.get(event.answer)
        if before is not None:
            self.histograms["inter_token_latency_seconds"].note((now - before) / 1e9)
        elif not watched.last_ns:
            self.histograms["time_to_first_token_seconds"].note((now - watched.arrived_ns) / 1e9)
            self._note_prompt(watched)
        watched.last_ns[event.answer] = now
        self.counters["generation_tokens"][""] += len(event.token_ids)

    def _note_prompt(self, watched: Watched) -> None:
        begins = watched.begins
        if begins is None:
            return
        tokens = begins.cached + begins.prompt
        self.histograms["request_prompt_tokens"].note(tokens)
        stored = "context" if begins.lookup == "named" else "beginning"
        for name, label, count in (
            ("prompt_tokens", "", tokens),
            ("prefix_cache_queries", "", tokens),
            ("prefix_cache_hits", "", begins.cached),
            ("prompt_tokens_by_source", "computed", begins.prompt),
            ("prompt_tokens_by_source", stored, begins.cached),
            ("beginning_lookups", begins.lookup, 1),
            ("beginning_misses", "" if begins.missed is None else begins.missed.reason, 1),
            ("requests_by_tier", begins.tier or "none", 1),
            ("requests_by_method", begins.method, 1),
        ):
            if label or not _COUNTERS[name][1]:
                self.counters[name][label] += count

    def _note_end(self, watched: Watched, event: Ends) -> None:
        times, count = event.times, event.completion_tokens
        figures: list[tuple[str, float]] = [
            ("e2e_request_latency_seconds", times.total_ns / 1e9),
            ("request_load_time_seconds", times.load_ns / 1e9),
            ("request_queue_time_seconds", times.queue_ns / 1e9),
            ("request_prefill_time_seconds", times.prompt_ns / 1e9),
            ("request_decode_time_seconds", times.after_prompt_ns / 1e9),
            ("request_generation_tokens", count),
        ]
        if count > 1:
            between = (times.total_ns - times.first_token_ns) / (count - 1)
            figures.append(("request_time_per_output_token_seconds", between / 1e9))
        for name, value in figures:
            self.histograms[name].note(value)
        self.counters["request_success"]["length" if event.reason == "length" else "stop"] += 1
        method = "" if watched.begins is None else watched.begins.method
        self.counters["keys_available"][method] += event.figures.get("available", 0)
        self.counters["keys_read"][method] += event.figures.get("attended", 0)
        if steps := event.figures.get("audited", 0):
            self._audited[method] += steps
            self._audited_kl[method] += event.figures["audited_kl_nanonats"]
        self.counters["spec_decode_num_draft_tokens"][""] += event.figures.get("drafted", 0)
        self.counters["spec_decode_num_accepted_tokens"][""] += event.figures.get("accepted", 0)

    def _note_failure(self, event: Fails) -> None:
        if event.reason == CancelledError.reason:
            self.counters["request_success"]["abort"] += 1
        else:
            self.counters["request_success"]["error"] += 1
            self.counters["request_failures"][event.reason] += 1

    def families(self, prefix: str, model: str) -> Iterator[Metric]:
        with self._lock:  # for a copy alone: who is told a token waits for it
            values = {name: histogram.told() for name, histogram in self.histograms.items()}
            counts = {name: dict(counter) for name, counter in self.counters.items()}
            audited = {
                method: (steps, self._audited_kl[method] / 1e9) for method, steps in self._audited.items()
            }
        for name, (_, said) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"{prefix}:{name}", said, labels=["model_name"])
            histogram.add_metric([model], *values[name])
            yield histogram
        for name, (said, labels) in _COUNTERS.items():
            counter = CounterMetricFamily(f"{prefix}:{name}", said, labels=["model_name", *labels])
            for label, count in (counts[name] if labels else {"": 0} | counts[name]).items():
                counter.add_metric([model, label] if labels else [model], count)
            yield counter
        said = "KL(full attention || method) of decode steps that were computed with both (--audit-share)."
        summary = SummaryMetricFamily(f"{prefix}:{_AUDITED}", said, labels=["model_name", "method"])
        for method, (steps, nats) in audited.items():
            summary.add_metric([model, method], steps, nats)
        yield summary


@dataclass(frozen=True, slots=True)
class Present:
    """What a server does now, as its parts count it."""

    facts: Facts
    engine: EngineStats
    arena: ArenaStats
    beginnings: BeginningStats
    tenants: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    mended: int = 0


class ServiceCollector(Collector):
    """A server's metrics, gathered when they are asked for."""

    def __init__(self, metrics: Metrics, present: Callable[[], Present], alias: bool) -> None:
        """alias: under vLLM's prefix, too."""
        self._metrics, self._present = metrics, present
        self._prefixes = (OURS, ALIAS) if alias else (OURS,)

    def collect(self) -> Iterable[Metric]:
        present = self._present()
        for prefix in self._prefixes:
            yield from self._metrics.families(prefix, present.facts.identity.name)
            yield from self._now(prefix, present)

    def _now(self, prefix: str, present: Present) -> Iterator[Metric]:
        """What engine and memory count anyway."""
        engine, arena, kept, facts = present.engine, present.arena, present.beginnings, present.facts
        model = facts.identity.name
        limit, running = engine.session_limit_bytes, engine.prompting + engine.decoding
        spoken_for = engine.session_bytes / limit if limit else 0.0
        taken = arena.used.total / arena.budget.total if arena.budget.total else 0.0
        values = {
            "num_requests_running": running,
            "num_requests_waiting": engine.requests - running,
            "kv_cache_usage_perc": spoken_for,
            "context_memory_usage_perc": taken,
            "contexts_in_memory": arena.contexts,
            "context_memory_bytes": arena.used.total,
            "context_memory_in_use_bytes": arena.leased.total,
            "decode_batch": engine.decode_batch,
            "context_loads": arena.loads,
            "kv_offload_load_bytes": arena.loaded_bytes,
            "context_hits": arena.hits,
            "context_evictions": arena.evictions,
            "kept_beginnings": kept.kept_beginnings,
            "host_read_bytes": engine.host_bytes_read,
            "rows_reused": engine.rows_reused,
            "contexts_mended": present.mended,
            "engine_steps": engine.steps,
            "decode_steps": engine.decode_steps,
        }
        for name, value in values.items():
            kind, said = _OF_NOW[name]
            family = kind(f"{prefix}:{name}", said, labels=["model_name"])
            family.add_metric([model], value)
            yield family
        for name, (count, said) in _OF_TENANTS.items():
            counter = CounterMetricFamily(f"{prefix}:{name}", said, labels=["model_name", "tenant"])
            for tenant, counts in present.tenants.items():
                counter.add_metric([model, tenant], counts.get(count, 0))
            yield counter
        told = {
            "model_name": model,
            "kv_dtype": facts.kv_dtype,
            "device": facts.device,
            "max_sessions": str(facts.max_sessions),
            "max_waiting": str(facts.max_waiting),
            "session_memory_bytes": str(limit or 0),
            "context_memory_bytes": str(arena.budget.total),
        }
        info = InfoMetricFamily(f"{prefix}:cache_config", "What the server was told.")
        info.add_metric([], told)
        yield info


class Exporter:
    """Answers Prometheus at a port of its own, from `start` to `close`."""

    def __init__(self, listen: str, alias: bool) -> None:
        """listen: HOST:PORT. alias: names under vLLM's prefix, too."""
        self._listen, self._alias = listen, alias
        self.metrics = Metrics()
        self._close: Callable[[], None] = lambda: None

    def start(self, present: Callable[[], Present]) -> None:
        """Raises AddressError."""
        registry = CollectorRegistry()
        registry.register(ServiceCollector(self.metrics, present, self._alias))
        host, _, port = self._listen.rpartition(":")
        try:
            server = _Server((host.strip("[]"), int(port)), registry)
        except OSError as error:
            raise AddressError.of(self._listen, "--metrics") from error
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()

        def close() -> None:
            server.shutdown()
            server.server_close()

        self._close = close

    def close(self) -> None:
        """Idempotent."""
        close, self._close = self._close, lambda: None
        close()


class _Server(ThreadingHTTPServer):
    """Tells a registry's metrics as plain text, whatever is accepted.

    The library's own server answers Prometheus in the OpenMetrics format, where it writes underscores for colons.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.registry = registry
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0

    def do_GET(self) -> None:
        body = generate_latest(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a scrape is no event."""


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


@dataclass(frozen=True, slots=True)
class Seeing:
    """None of what nobody wants, which then costs nothing. audit_share: of answers of methods that search."""

    exporter: Exporter | None = None
    kv_events: KVEvents | None = None
    spans: RequestSpans | None = None
    audit_share: float = 0.0

    def watch(self, order: Order, reply: Reply, arrived_ns: int) -> None:
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
        for each in (self.exporter, self.kv_events, self.spans):
            if each is not None:
                each.close()
