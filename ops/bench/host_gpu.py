"""Decode steps of a whole model whose query tables are searched on the CPU: how long the GPU waits for it.

The model is transformers' Llama in the shape of Llama-3.1-8B with random weights, bfloat16, and every session has a
random context of its own, as in `decode_gpu.py`; keys and values are in page-locked host memory, tables in the host's.
Steps run through the engine's own graphs, mailboxes and threads, a batch in one lane or split into several.

`step_ms` is a step with everything around it (median, wall clock), `p99_ms` the 99th percentile. `device_ms` is
the same replays with all lists there before they are asked for: what the GPU has to do. So `wait` is the share of the
step in which the GPU stood still for the host, and `lane_wait_ms` what the launches that wait counted in a lane, where
the other lane computes meanwhile. `table_mb` are read by the search of a step, `read_gb_s` is what the same threads
read in the same run when they do nothing else (`search_cpu.py`), and `model_ms` follows: device and search one after
the other in one lane, the longer of both in several.

Before times are reported, the lists of the last layer of every session must be those that the general path selects for
the queries that the device has posted, and logits of the step must be near those of the general path (where rounding
to bfloat16 changes which keys are selected).

One JSON line per figure; the exit code is 1 when a check fails, or when --bars is given and two lanes or more wait for
10 % of a step or longer at 32,768 tokens, batch 4.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported

# isort: split
import torch
import typer
from general_steps import (
    WARM_UP,
    CheckFailedError,
    compare,
    forward,
    parse_method,
    start_sessions,
    step_figures,
    time_steps,
)
from random_model import make_contexts, make_model
from search_cpu import read_us
from torch import Tensor

from decode_engine.config import Compilation, search_cores
from decode_engine.device.step_batch import step_counts
from decode_engine.device.step_graph import StepGraph
from decode_engine.device.step_model import step_model
from decode_engine.device.stepper import Stepper
from decode_engine.evaluation.machine import describe_machine
from decode_engine.host.mailbox import Mailbox
from decode_engine.host.steps import HostSteps
from decode_engine.host.workers import SearchThreads
from decode_engine.kernels import records
from decode_engine.sampler import Sampler, SamplingParameters
from decode_engine.session import Session
from index_store.budgets.base import best_keys
from index_store.context import ResidentContext
from index_store.indexes.table_parameters import TableParameters
from index_store.kernels.shared_search import COUNT_BITS
from index_store.methods import Method
from index_store.placement import Placement

TURNS = 25
TOLERANCE = 0.35
"""Root mean square of the difference of logits, relative to their spread."""
WAIT_BAR, BAR_SHAPE = 0.1, (32768, 4)
_READ_BYTES = 2**22
ANSWERED = 1 << (62 - COUNT_BITS)
"""A number that no search comes to."""


class Lanes:
    """Sessions whose steps run in so many lanes."""

    def __init__(
        self, run: Any, model: Any, contexts: list[ResidentContext], method: Method, threads: SearchThreads
    ):
        identity, weights = contexts[0].manifest.model, next(model.parameters())
        self.stepper = Stepper(run, identity, weights.dtype, weights.device, searching=threads)
        self._lanes = threads.lanes if contexts[0].placement is Placement.HOST else 1
        self.samplers = [Sampler(SamplingParameters())] * len(contexts)
        self.start(contexts, method)

    def start(self, contexts: list[ResidentContext], method: Method) -> None:
        """New sessions in place of those that there are."""
        self.sessions = start_sessions(contexts, method)
        if not all(self.stepper.takes(session) for session in self.sessions):
            raise CheckFailedError("the method does not run in a graph")
        share = -(-len(contexts) // self._lanes)
        self.parts = [self.sessions[first : first + share] for first in range(0, len(contexts), share)]

    def step(self, tokens: Sequence[int]) -> list[int]:
        results = self.stepper.step(self.sessions, tokens, self.samplers)
        for result in results:
            if isinstance(result, Exception):
                raise CheckFailedError(str(result))
        return [int(result) for result in results if isinstance(result, int)]

    @property
    def graphs(self) -> list[StepGraph]:
        return [self.stepper.graph(part, 0, lane) for lane, part in enumerate(self.parts)]

    def logits(self) -> Tensor:
        """Of the last step, [B, V] float32."""
        found = [graph.logits_BV[: len(part)] for graph, part in zip(self.graphs, self.parts, strict=True)]
        return torch.cat(found).float().clone()

    @property
    def mailboxes(self) -> list[Mailbox]:
        steps = [
            each for graph in self.graphs for each in graph.batch.attentions if isinstance(each, HostSteps)
        ]
        return [each.mailbox for each in steps]

    def waited_ms(self) -> float:
        """Of all lanes' steps until now, on average over the lanes."""
        return statistics.mean(part[0].figures.device_wait_for_host_ns for part in self.parts) * 1e-6

    def device_ms(self) -> float:
        """Median time of replays that find all lists there."""
        for mailbox in self.mailboxes:
            words = mailbox.shared.answers_RX[:, 0]
            words.copy_((ANSWERED << COUNT_BITS) | (words & ((1 << COUNT_BITS) - 1)))
        graphs = self.graphs
        streams = [None, *(torch.cuda.Stream() for _ in graphs[1:])]  # type: ignore[no-untyped-call]
        times = []
        for _ in range(TURNS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for graph, stream in zip(graphs, streams, strict=True):
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    graph.run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e3


def times_of(lanes: Lanes, turns: int) -> dict[str, float]:
    """Wall clock and waits of steps."""
    tokens = lanes.step(range(7, 7 + len(lanes.sessions)))
    _, tokens = time_steps(lanes.step, tokens, WARM_UP, math.inf)
    before = lanes.waited_ms()
    times, _ = time_steps(lanes.step, tokens, turns, math.inf)
    waited_ms = (lanes.waited_ms() - before) / len(times)
    return step_figures(times, len(lanes.sessions)) | {"lane_wait_ms": round(waited_ms, 3)}


def check_lists(lanes: Lanes, method: Method) -> None:
    """Raises CheckFailedError unless the last layer's lists are the general path's for the posted queries."""
    for mailbox, part in zip(lanes.mailboxes, lanes.parts, strict=True):
        layer = mailbox.order[-1]
        for row, session in zip(mailbox.used, part, strict=True):
            manifest = session.context.manifest
            model, counts = manifest.model, session_counts(session)
            shape = (model.kv_heads, 1, model.query_heads // model.kv_heads, model.head_dim)
            q_HTGD = mailbox.shared.q_BX[row].view(shape) * model.head_dim**-0.5
            name = "" if method.index is None else method.index.name
            ranking = session.context.index(name, layer).rank(
                q_HTGD, counts[records.FIRST], counts[records.END], None, method.search
            )
            kept = best_keys(ranking, counts[records.KEEP], "average")
            for h in range(model.kv_heads):
                found = mailbox.answer(layer, row * model.kv_heads + h)
                wanted = kept.ids_HTK[h, 0, : int(kept.counts_HT[h, 0])]
                if found is None or not torch.equal(found, wanted):
                    raise CheckFailedError(f"the list of KV head {h} is not the general path's")


def session_counts(session: Session) -> Mapping[int, int]:
    """Of the step that the session has just taken."""
    session.position -= 1
    try:
        return step_counts(session)
    finally:
        session.position += 1


def table_bytes(sessions: Sequence[Session], method: Method) -> int:
    """That the search of one step reads."""
    if method.index is None:
        return 0
    subspaces = TableParameters.parse(method.index.parameters).subspaces
    total = 0
    for session in sessions:
        model = session.context.manifest.model
        queries = 1 if method.search.get("group") == "pooled" else model.query_heads // model.kv_heads
        total += model.layers * model.kv_heads * queries * subspaces * session.context.manifest.token_count
    return total


def read_bandwidth(contexts: list[ResidentContext], method: Method, threads: int) -> float:
    """GB/s at which so many threads read tables."""
    name = "" if method.index is None else method.index.name
    tables = [context.index(name, 0).arrays()["scores"] for context in contexts]
    return _READ_BYTES / read_us(tables, _READ_BYTES, threads) / 1e3


def measure(
    run: Any,
    model: Any,
    contexts: list[ResidentContext],
    method: Method,
    threads: int,
    lane_counts: Sequence[int],
    turns: int,
    waves: int,
) -> list[dict[str, Any]]:
    """The figures of one method, one for each number of lanes."""
    tokens = list(range(7, 7 + len(contexts)))
    expected = forward(model, start_sessions(contexts, method), tokens)
    bandwidth = read_bandwidth(contexts, method, threads)
    rows = []
    for count in lane_counts:
        searching = SearchThreads(threads, count, waves)
        try:
            first = Lanes(run, model, contexts, method, searching)
            first.step(tokens)
            check_lists(first, method)
            difference = compare(first.logits(), expected, TOLERANCE)
            row: dict[str, Any] = {"lanes": count} | times_of(first, turns)
            device_ms = first.device_ms()
            search_ms = table_bytes(first.sessions, method) / bandwidth * 1e-6
            model_ms = device_ms + search_ms if count == 1 else max(device_ms, search_ms)
            row |= {
                "device_ms": round(device_ms, 3),
                "wait": round(max(0.0, 1 - device_ms / row["step_ms"]), 4),
                "table_mb": round(table_bytes(first.sessions, method) * 1e-6, 1),
                "read_gb_s": round(bandwidth, 1),
                "model_ms": round(model_ms, 3),
                "logits_difference": round(difference, 4),
            }
            rows.append(row)
            del first
        finally:
            searching.close()
        torch.cuda.empty_cache()
    return rows


def main(
    methods: Annotated[str, typer.Option(help="Comma-separated; see decode_gpu.py.")] = (
        "csattention+dropped:0.01/m8/pooled,csattention:0.01/pooled,csattention:0.01"
    ),
    shapes: Annotated[str, typer.Option(help="LENGTHxBATCH, comma-separated.")] = "32768x4",
    lanes: Annotated[str, typer.Option(help="Numbers of lanes, comma-separated.")] = "1,2",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    threads: Annotated[int, typer.Option(help="Threads that search, 0 for all cores but two.")] = 0,
    compilation: Annotated[Compilation, typer.Option(help="Of the model.")] = Compilation.DEFAULT,
    turns: Annotated[int, typer.Option(help="Steps that are timed.")] = TURNS,
    waves: Annotated[int, typer.Option(help="Parts in which lists of a layer are waited for.")] = 1,
    bars: Annotated[bool, typer.Option(help="Fail when a figure misses its bar.")] = False,
) -> None:
    """Times decode steps that are searched for on the host."""
    if not torch.cuda.is_available():
        typer.echo("error: this benchmark needs a CUDA device", err=True)
        raise typer.Exit(1)
    threads = threads or search_cores()
    model, identity = make_model(layers)
    torch.cuda.empty_cache()
    run, machine, failed = step_model(model, compilation), describe_machine(), False
    counts = [int(count) for count in lanes.split(",")]
    for shape in shapes.split(","):
        length, batch = (int(part) for part in shape.split("x"))
        listed = {label: parse_method(label) for label in methods.split(",")}
        contexts = make_contexts(identity, tuple(listed.values()), length, batch, Placement.HOST)
        for label, method in listed.items():
            line: dict[str, Any] = {
                "figure": "host", "method": label, "tokens": length, "batch": batch, "layers": layers,
                "threads": threads, "waves": waves, "compilation": compilation.value, "machine": machine,
            }  # fmt: skip
            fitting = [count for count in counts if count <= batch]
            try:
                rows = measure(run, model, contexts, method, threads, fitting, turns, waves)
            except (CheckFailedError, torch.cuda.OutOfMemoryError) as error:
                rows, failed = [{"error": str(error)[:300]}], True
            for row in rows:
                if (length, batch) == BAR_SHAPE and row.get("lanes", 1) > 1 and row["wait"] >= WAIT_BAR:
                    row["missed"] = True
                    failed = failed or bars
                typer.echo(json.dumps(line | row))
            torch.cuda.empty_cache()
        del contexts
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
