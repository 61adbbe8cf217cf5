"""Decode steps of a whole model on a GPU, through the engine's own captured graphs: how long they take, and where.

The model is transformers' Llama in the shape of Llama-3.1-8B with random weights, bfloat16. Contexts are random and
lie in the GPU's memory; several layers' worth of keys, values and indexes take turns over the model's layers, and
every sequence of a batch has a context of its own, so that nothing is found in the second-level cache. With
`--placement hybrid` keys and values are in page-locked host memory instead, every layer's in a range of its own. All
methods run through the same code: one operator for attention, the same compilation, one CUDA graph a step, greedy
sampling.

- `none`: a stand-in for attention that reads nothing: what is left is the rest of the model.
- `full`: attention to every key by the engine's own kernel, which is checked against torch's fastest; see
  `attention_gpu.py` for how they compare.
- `streamed`: attention to every key by the general path, which streams them from host memory; no graph.
- methods: as in `decode-engine methods`; `NAME:KEEP` gives the share of keys that is kept, `/m8` and `/pooled` variants
  of query tables. Those without kernels run on the general path, as they do when they are served (`captured` is false).

`step_ms` is one step with everything around it (median, wall clock), `p99_ms` the 99th percentile (of fewer than a
hundred steps, the slowest), `steps` how many were timed: `--turns`, on the general path fewer where these would take
longer than ten seconds. `graph_ms` is the replay alone, `eager_ms` the same launched from Python. `tokens_per_s`
follows from `step_ms`. In `hybrid`,
`host_mb` were read from host memory in a step, and `reused` is the share of rows that were found in slots on the device
instead. `split_us` is the time of a replay by what its kernels do.
Before a time is reported the logits of the same graph with a budget of all keys are compared with those of full
attention by the general path; so are those of methods on the general path whose search can yield all keys. What
selections cost in answers is the evaluation's business.

One JSON line per figure; the exit code is 1 when a check fails, or when --bars is given and a figure misses its bar.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
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
    measure_general,
    parse_method,
    start_sessions,
    step_figures,
)
from gpu_timing import copy_bandwidth, event_ms
from random_model import make_contexts, make_model, read_bytes
from torch import Tensor

from decode_engine.config import Compilation
from decode_engine.device.dense_steps import DenseSteps
from decode_engine.device.step_attention import StepAttention
from decode_engine.device.step_graph import StepGraph
from decode_engine.device.step_model import step_model
from decode_engine.device.stepper import Stepper
from decode_engine.evaluation.machine import describe_machine
from decode_engine.sampler import Sampler, SamplingParameters
from decode_engine.session import Session
from index_store.budgets.ratio import Ratio
from index_store.context import ResidentContext
from index_store.manifest import Manifest
from index_store.methods import Method, get_method
from index_store.placement import Placement

DTYPE = "bfloat16"
TURNS = 25
MOVED = ("host_bytes_read", "rows_reused")
REST_BAR, SPEEDUP_BARS = 1.35, {1: 1.7, 4: 2.5}

KINDS = {
    "search": r"(pick|sample|sample_pooled|score|combine|select|tables|keep|join|lookup)_kernel",
    "fetch": r"(find|claim|copy)_kernel",
    "host": r"(post|await)_kernel",
    "remainder": r"(correct|remainder)_kernel",
    "attend": r"(attend|dense|tail_write|merge)_kernel",
}
"""What kernels do, by their whole name; all others are the rest of the model. A lookup scores clusters, which
is for the search or for the remainder."""


class NothingSteps(StepAttention):
    """Stands for attention that costs nothing."""

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        return None

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return {}

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        return q_BHGD.clone()

    def kept_B(self) -> Tensor:
        return torch.zeros(self.plan.size, dtype=torch.int64, device=self.plan.device)


def measure(
    model: Any, stepper: Stepper, contexts: list[ResidentContext], method: Method, checked: bool, turns: int
) -> dict[str, Any]:
    """Times of one method's steps, after the logits of the same graph with a budget of all keys were compared."""
    batch = len(contexts)
    samplers = [Sampler(SamplingParameters())] * batch
    tokens = list(range(7, 7 + batch))
    difference = 0.0
    if checked:
        whole = replace(method, budget=Ratio(1.0)) if method.sparse else method
        checking = start_sessions(contexts, whole)
        stepper.step(checking, tokens, samplers)
        got_BV = stepper.graph(checking).logits_BV[:batch].float().clone()
        exact = start_sessions(contexts, get_method("full"))
        difference = compare(got_BV, forward(model, exact, tokens))
        del checking, exact
    sessions = start_sessions(contexts, method)
    begin = time.perf_counter()
    chosen = stepper.step(sessions, tokens, samplers)
    ready_s = time.perf_counter() - begin
    graph = stepper.graph(sessions)
    times, moved = [], []
    for _ in range(turns + WARM_UP):
        begin = time.perf_counter()
        chosen = stepper.step(sessions, [int(token) for token in chosen], samplers)  # type: ignore[arg-type]
        times.append(time.perf_counter() - begin)
        moved.append([sum(getattr(session.figures, name) for session in sessions) for name in MOVED])
    figures = sessions[0].figures
    return (
        step_figures(times[WARM_UP:], batch)
        | {
            "graph_ms": round(statistics.median(event_ms(graph.run) for _ in range(TURNS)), 3),
            "eager_ms": round(eager_ms(graph), 3),
            "captured": graph.captured,
            "first_step_s": round(ready_s, 1),
            "logits_difference": round(difference, 4),
            "attended": round(figures.sparse_fraction if method.sparse else 1.0, 4),
            "split_us": split_us(graph),
        }
        | moved_figures(contexts[0], moved[-1 - turns], moved[-1], turns)
    )


def moved_figures(
    context: ResidentContext, before: list[int], after: list[int], turns: int
) -> dict[str, float]:
    """What steps moved and found, of contexts in host memory."""
    if context.placement is Placement.DEVICE:
        return {}
    read, reused = (int(end - begin) for begin, end in zip(before, after, strict=True))
    rows = read // (2 * context.manifest.model.head_dim * 2)
    return {
        "host_mb": round(read / turns * 1e-6, 3),
        "reused": round(reused / max(1, rows + reused), 4),
    }


def eager_ms(graph: StepGraph) -> float:
    """Median time of the step launched from Python."""
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.compute()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[3:])


def split_us(graph: StepGraph) -> dict[str, float]:
    """Microseconds of a replay by what its kernels do; empty where the profiler does not work.

    A kernel that was launched early, to wait in its place for the one before, counts from that one's end.
    """
    graph.run()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.run()
            torch.cuda.synchronize()
    except RuntimeError as error:
        typer.echo(f"no split, the profiler failed: {error}", err=True)
        return {}
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type.name == "CUDA"
    ]
    totals: dict[str, float] = defaultdict(float)
    reached = 0.0
    for begin, end, name in sorted(spans):
        kind = next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)), "rest")
        totals[kind] += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return {name: round(total, 1) for name, total in totals.items()}


def main(
    methods: Annotated[str, typer.Option(help="Comma-separated; NAME:KEEP.")] = (
        "none,full,csattention+dropped:0.01/m8/pooled,csattention+dropped:0.01,csattention:0.01,csattention:0.05,"
        "multipole:0.05,pq+dropped:0.01,pq:0.01"
    ),
    shapes: Annotated[
        str, typer.Option(help="LENGTHxBATCH, comma-separated.")
    ] = "131072x1,131072x4,32768x16",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    compilation: Annotated[Compilation, typer.Option(help="Of the model.")] = Compilation.DEFAULT,
    placement: Annotated[Placement, typer.Option(help="Of the contexts.")] = Placement.DEVICE,
    prefetch: Annotated[
        bool, typer.Option("--prefetch", help="Fetch rows a layer ahead, for queries foretold.")
    ] = False,
    turns: Annotated[int, typer.Option(help="Steps that are timed, of every method.")] = TURNS,
    bars: Annotated[
        bool, typer.Option(help="Fail when a figure misses its bar; bars are for contexts in GPU memory.")
    ] = False,
) -> None:
    """Times decode steps of a whole model."""
    if prefetch and placement is Placement.DEVICE:
        raise typer.BadParameter("--prefetch is for contexts in host memory, such as --placement hybrid")
    if not torch.cuda.is_available():
        typer.echo("error: this benchmark needs a CUDA device", err=True)
        raise typer.Exit(1)
    model, identity = make_model(layers)
    weights_ms = read_bytes(model) / copy_bandwidth() * 1e3
    torch.cuda.empty_cache()
    run, device = step_model(model, compilation, prefetch), next(model.parameters()).device
    machine, failed = describe_machine(), False
    for shape in shapes.split(","):
        length, batch = (int(part) for part in shape.split("x"))
        full_ms: float | None = None
        listed = {
            label: parse_method("full" if label in ("none", "streamed") else label)
            for label in methods.split(",")
        }
        contexts = make_contexts(identity, tuple(listed.values()), length, batch, placement)
        for label, method in listed.items():
            nothing = label == "none"
            line: dict[str, Any] = {
                "figure": "decode", "method": label, "placement": placement.value, "tokens": length, "batch": batch,
                "layers": layers, "compilation": compilation.value, "prefetch": prefetch,
                "weights_ms": round(weights_ms, 3), "machine": machine,
            }  # fmt: skip
            dense = NothingSteps if nothing else DenseSteps
            stepper = Stepper(run, identity, torch.bfloat16, device, dense=dense)
            try:
                if label == "streamed" or not stepper.takes(Session(contexts[0], method)):
                    line |= measure_general(model, contexts, method, turns)
                else:
                    line |= measure(model, stepper, contexts, method, not nothing, turns)
            except (CheckFailedError, torch.cuda.OutOfMemoryError) as error:
                line["error"] = str(error)[:300]
                failed = True
            else:
                if nothing:
                    line["rest_over_weights"] = round(line["graph_ms"] / weights_ms, 3)
                elif label == "full":
                    full_ms = line["step_ms"]
                elif full_ms is not None:
                    line["speedup"] = round(full_ms / line["step_ms"], 3)
            if bars and misses(line):
                line["missed"] = failed = True
            typer.echo(json.dumps(line))
            del stepper
            torch.cuda.empty_cache()
        del contexts
    raise typer.Exit(1 if failed else 0)


def misses(line: Mapping[str, Any]) -> bool:
    """Whether the figure has a bar and does not reach it."""
    if line["method"] == "none":
        return bool(line.get("rest_over_weights", 99.0) > REST_BAR)
    wanted = SPEEDUP_BARS.get(line["batch"])
    if (
        line["method"].startswith("csattention")
        and line["method"].split("/")[0].endswith(":0.01")
        and wanted is not None
    ):
        return bool(line.get("speedup", 0.0) < wanted)
    return False


if __name__ == "__main__":
    typer.run(main)
